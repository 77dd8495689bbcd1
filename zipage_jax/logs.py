"""Log lines on stderr for programs that have not set up logging: a compilation of half a minute should not look like a hang."""

import logging


def show_logs() -> None:
    """Show this package's log from INFO on, until the program sets up logging or chose a level for `zipage_jax` itself."""
    logger = logging.getLogger("zipage_jax")
    if logger.level != logging.NOTSET or logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
