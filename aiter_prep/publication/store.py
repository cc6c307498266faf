"""Pushes a prepared folder to an object store: checked first, manifest last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.publication.task import task_of
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.files import read_whole
from aiter_prep.storage.object_store import ObjectFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiter_prep.storage.hub_upload import HubFile
    from aiter_prep.storage.supply import Promise

NOTES_FILE = ".aiter_prep.push"  # what was sent, until the manifest is there


def push_to_store(
    folder: Path, url: str, files: Mapping[str, HubFile], *, overwrite: bool = False
) -> tuple[str, ...]:
    """Write the files of a folder to an object store; return the names that had to be sent.

    Stores say nothing of an object's SHA-256. So what was sent is noted beside it, with what the
    store calls its state, until the manifest is there: the same call goes on from these notes.
    Once the manifest is there, the objects are taken for what it says if their sizes are right.

    Args:
        folder: A folder that was verified.
        url: Such as `s3://bucket/folder`.
        files: Size and SHA-256 of its files.
        overwrite: Replace another conversion, and delete what is not of the folder.

    Raises:
        OutputNotEmpty: Something else is there.
        AiterPrepError: The store refuses, or is out of reach.
        InvalidUsage: It is no address of a store that is known.
    """
    store = ObjectFolder(url)
    there = store.list()
    notes = _Notes(store, there)
    is_whole = _holds_our_manifest(store, there, folder)

    def is_there(name: str) -> bool:
        found = there.get(name)
        if found is None or found.size != files[name].size:
            return False
        return is_whole or notes.knows(name, found, files[name].sha256)

    sizes = {name: file.size for name, file in files.items()}
    names = there.keys() - {NOTES_FILE}
    task = task_of(sizes, names, is_there, f"`{store.name}`", overwrite=overwrite)
    for change in task.changes():
        for name in change.delete:
            store.delete(name)
        for name in change.add:
            state = store.put(name, folder / name)
            if name != MANIFEST_FILE:
                notes.add(name, state, files[name].sha256)
    notes.remove()
    return task.add


def _holds_our_manifest(store: ObjectFolder, there: Mapping[str, Promise], folder: Path) -> bool:
    found = there.get(MANIFEST_FILE)
    size = (folder / MANIFEST_FILE).stat().st_size
    if found is None or found.size != size:
        return False
    return store.read(MANIFEST_FILE, 0, size) == read_whole(folder / MANIFEST_FILE, size)


class _Notes:
    """What was sent already: name to SHA-256 and what the store calls the state of the object."""

    def __init__(self, store: ObjectFolder, there: Mapping[str, Promise]) -> None:
        self._store = store
        self._exists = NOTES_FILE in there
        self._sent: dict[str, list[str]] = {}
        if self._exists:
            text = store.read(NOTES_FILE, 0, there[NOTES_FILE].size)
            try:
                self._sent = dict(json.loads(text))
            except (ValueError, TypeError):
                self._sent = {}  # cut off, or not ours: everything is sent again

    def knows(self, name: str, found: Promise, sha256: str | None) -> bool:
        """Return whether an object is still the one that was sent, of these bytes."""
        return bool(found.version) and self._sent.get(name) == [sha256, found.version]

    def add(self, name: str, state: Promise, sha256: str | None) -> None:
        """Note an object that was sent."""
        self._sent[name] = [str(sha256), state.version]
        self._store.put_bytes(NOTES_FILE, json.dumps(self._sent).encode())
        self._exists = True

    def remove(self) -> None:
        """Delete the notes: all is there."""
        if self._exists:
            self._store.delete(NOTES_FILE)
