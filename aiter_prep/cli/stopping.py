"""Ends the program soon after Ctrl-C or SIGTERM, whatever it is doing."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

GRACE_SECONDS = 1.5
EXIT_CODE = 130


@contextmanager
def stopping(last_words: Callable[[], None]) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a KeyboardInterrupt that cannot be sat out.

    What is being written is written so that a kill at any moment does no harm. So a download or a
    slow disk that does not give way within `GRACE_SECONDS` is left, and so it is at once on a
    second signal.

    Args:
        last_words: Called before the program is left so.
    """
    stopper = _Stopper(last_words)
    signals = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        signals = []  # handlers belong to the main thread
    before = {number: signal.signal(number, stopper) for number in signals}
    try:
        yield
    finally:
        stopper.disarm()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stopper:
    """The signal handler."""

    def __init__(self, last_words: Callable[[], None]) -> None:
        self._last_words = last_words
        self._timer: threading.Timer | None = None

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self._timer is not None:
            self._leave()
        self._timer = threading.Timer(GRACE_SECONDS, self._leave)
        self._timer.daemon = True
        self._timer.start()
        raise KeyboardInterrupt

    def disarm(self) -> None:
        """Let the program end by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _leave(self) -> None:
        try:
            self._last_words()
        finally:
            os._exit(EXIT_CODE)
