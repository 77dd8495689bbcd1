"""Sections that one thread at a time runs, to their end: what they change is never seen, or left, half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def exclusive(lock: contextlib.AbstractContextManager) -> Iterator[None]:
    """Hold `lock`; Ctrl-C takes effect at the end of the block. Only the main thread is ever interrupted."""
    with lock, _interrupts_deferred():
        yield


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: caught.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])
