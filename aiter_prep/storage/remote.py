"""Opens a checkpoint that lies elsewhere by its headers; its shards come while it is converted."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aiter_prep.errors import BadSource
from aiter_prep.storage.checkpoint import CONFIG_FILE, Checkpoint, open_by_headers
from aiter_prep.storage.folder import PARTIAL_SUFFIX
from aiter_prep.storage.header import PREFIX_BYTES, header_length, parse_header
from aiter_prep.storage.hub import shard_names, small_names
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.supply import RemoteShards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiter_prep.storage.header import Header
    from aiter_prep.storage.supply import Promise

FIRST_BYTES = 256 * 1024  # holds most headers
READERS = 8  # headers at a time: each costs a round trip or two


class RemoteFolder(Protocol):
    """A folder of files elsewhere.

    Attributes:
        name: What to call it.
        revision: The commit that it is at, or None.
        state: The name of a folder for what is fetched: another where the files are others.
        files: What is promised of each file, by name.
    """

    name: str
    revision: str | None
    state: str
    files: Mapping[str, Promise]

    def fetch(self, file: str, folder: Path) -> None:
        """Bring a file into a folder; go on with what was begun there.

        Raises:
            BadSource: It cannot be had.
        """

    def read(self, file: str, start: int, size: int) -> bytes:
        """Return some bytes of a file, less where it ends.

        Raises:
            BadSource: They cannot be had.
        """


def scratch_folder(out: Path) -> Path:
    """Return where the shards of a source lie while a folder is made of it."""
    out = out.resolve()
    return out.with_name(f".{out.name}.aiter_prep.source{PARTIAL_SUFFIX}")


def open_remote(remote: RemoteFolder, scratch: Path, limit_bytes: int | None = None) -> Checkpoint:
    """Open a checkpoint elsewhere: small files are fetched whole, of shards the headers alone.

    Args:
        remote: Where it lies.
        scratch: A folder of our own for what is fetched.
        limit_bytes: Most bytes of shards that a run has on the disk at a time.

    Raises:
        BadSource: Something is missing, out of reach or contradicts itself.
        NoRule: It is prepared already, or holds a dtype that is not known.
    """
    folder = scratch / remote.state
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for other in scratch.iterdir():
            if other != folder:  # what was fetched of it is of no use
                shutil.rmtree(other, ignore_errors=True)
    except OSError as fault:
        raise BadSource(f"cannot write `{printable(str(folder))}`: {fault.strerror}") from None
    names = sorted(remote.files)
    if CONFIG_FILE not in names:
        raise BadSource(f"`{printable(remote.name)}` has no `{CONFIG_FILE}`")

    def fetched(name: str) -> Path:
        remote.fetch(name, folder)
        remote.files[name].check(folder / name)
        return folder / name

    shards = shard_names(remote.name, names, fetched)
    for name in small_names(names):
        fetched(name)
    with ThreadPoolExecutor(READERS, thread_name_prefix="aiter-prep-headers") as pool:
        headers = list(pool.map(lambda shard: _header(remote, shard), shards))
    promises = {shard: remote.files[shard] for shard in shards}
    found = RemoteShards(folder, promises, remote.fetch, scratch, limit_bytes)
    return open_by_headers(headers, found, name=remote.name, revision=remote.revision)


def _header(remote: RemoteFolder, file: str) -> Header:
    size = remote.files[file].size
    raw = remote.read(file, 0, min(FIRST_BYTES, size))
    length = PREFIX_BYTES + header_length(raw[:PREFIX_BYTES], size, printable(file))
    if len(raw) < length:
        raw += remote.read(file, len(raw), length - len(raw))
    if len(raw) < length:
        raise BadSource(f"shard `{printable(file)}` ended inside its header", "try again")
    return parse_header(raw[:length], file, size)
