"""The journal of a run: what is finished, line by line, each line with its digest."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from aiter_prep.storage import jsontext
from aiter_prep.storage.digest import digest_of
from aiter_prep.storage.folder import JOURNAL_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Journal:
    """The journal of one folder.

    Args:
        folder: The folder that is being written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL_FILE

    def exists(self) -> bool:
        """Return whether a run was begun here."""
        return self._path.exists()

    def append(self, *entries: Mapping[str, Any]) -> None:
        """Bring entries to the disk, each whole or not at all.

        Raises:
            OSError: The disk is full or fails.
        """
        lines = b"".join(map(line_of, entries))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, lines)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)  # half a line would hide those after it
                raise
        finally:
            os.close(descriptor)

    def entries(self) -> list[dict[str, Any]]:
        """Return the whole entries; a kill may have cut the last one."""
        return self._read()[0]

    def mend(self) -> list[dict[str, Any]]:
        """Cut off what is behind the last whole entry; return the entries."""
        entries, size = self._read()
        os.truncate(self._path, size)
        return entries

    def remove(self) -> None:
        """Remove the journal; the run is finished, or forgotten."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        entries: list[dict[str, Any]] = []
        size = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            text = text_of_line(line)
            if text is None:
                break
            entries.append(json.loads(text))
            size += len(line)
        return entries, size


def line_of(entry: Mapping[str, Any]) -> bytes:
    """Return an entry as a line: canonical JSON, a tab, the digest of that JSON."""
    text = jsontext.canonical(entry)
    return text + b"\t" + digest_of(text).encode() + b"\n"


def text_of_line(line: bytes) -> bytes | None:
    """Return the JSON of a line, or None if a kill has cut it."""
    text, _, digest = line.partition(b"\t")
    return text if digest.decode(errors="replace") == digest_of(text) + "\n" else None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def differing_facts(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return in words how facts differ: `tp 4 and 8`, `source`."""
    names = sorted(n for n in {*ours, *theirs} if ours.get(n) != theirs.get(n))
    if len(names) > 1 and "tensors" in names:
        names.remove("tensors")  # follows from the others
    if "version" in names and "code" in names:
        names.remove("code")
    return ", ".join(
        name if _is_digest(ours.get(name)) else f"{name} {ours.get(name)} and {theirs.get(name)}"
        for name in names
    )


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and ":" in value
