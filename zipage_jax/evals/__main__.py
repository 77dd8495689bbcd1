"""`python -m zipage_jax.evals NAME [options]`: runs `main(argv)` of zipage_jax/evals/NAME.py."""

import importlib
import sys

COMMANDS = ("policies",)


def main(argv: list[str]) -> None:
    if not argv or argv[0] not in COMMANDS:
        sys.exit(f"usage: python -m zipage_jax.evals {{{','.join(COMMANDS)}}} [options]")
    importlib.import_module(f"zipage_jax.evals.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
