"""A file that keeps what a command says, with the time."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.side_files import is_written_in_place, open_in_place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Log:
    """Appends lines to a file, each with the time in UTC; whole lines, whatever happens.

    A log is no reason to lose the work that it tells of: once it cannot be written, it ends.

    Args:
        path: The file; what it holds stays.
        warn: Called once, with why no more is written.

    Raises:
        AiterPrepError: It cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._name = printable(str(path))
        self._warn = warn
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            in_place = is_written_in_place(path)
            self._descriptor = open_in_place(path) if in_place else os.open(path, flags, 0o644)
        except OSError as fault:
            raise AiterPrepError(
                f"cannot write the log `{self._name}`: {fault.strerror}",
                "give --log-file a place that can be written, outside the output folder",
            ) from None

    def write(self, line: str) -> None:
        """Append a line."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        text = f"{now.replace('+00:00', 'Z')} {line}\n"
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while self._descriptor >= 0 and rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as fault:
            self._end(f"cannot write the log `{self._name}` any more: {fault.strerror}")

    def close(self) -> None:
        """Close the file; twice is harmless."""
        self._end("")

    def _end(self, why: str) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if descriptor >= 0:
                os.close(descriptor)
        except OSError as fault:  # some filesystems say only now that the disk is full
            why = why or f"the end of the log `{self._name}` may be missing: {fault.strerror}"
        if why:
            self._warn(why)
