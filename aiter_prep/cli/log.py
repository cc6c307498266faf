"""A file that keeps what a command says, with the time."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from pathlib import Path


class Log:
    """Appends lines to a file, each with the time in UTC; whole lines, whatever happens.

    Args:
        path: The file; what it holds stays.

    Raises:
        AiterPrepError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError as fault:
            raise self._fault(fault) from None

    def write(self, line: str) -> None:
        """Append a line.

        Raises:
            AiterPrepError: The disk is full or fails.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        try:
            self._file.write(f"{now.replace('+00:00', 'Z')} {line}\n")
        except OSError as fault:
            raise self._fault(fault) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _fault(self, fault: OSError) -> AiterPrepError:
        return AiterPrepError(
            f"cannot write the log `{printable(str(self._path))}`: {fault.strerror}",
            "give --log-file a place that can be written, outside the output folder",
        )
