"""Folders in object stores, by way of fsspec: read shard by shard, written file by file."""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError, BadSource, InvalidUsage
from aiter_prep.storage.folder import partial_file
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.supply import Promise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import TypeVar

    T = TypeVar("T")

# scheme of an address to the package that brings it
STORES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
BLOCK_BYTES = 64 * 1024 * 1024
PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before another attempt
# what stores call the state of an object, the surer first
_VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "content_md5",
    "LastModified",
    "mtime",
    "created",
)

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.ASCII)


def is_store_url(text: str) -> bool:
    """Return whether a text is an address, `scheme://...`, and no path."""
    return _URL.fullmatch(text) is not None


class ObjectFolder:
    """A folder of objects: those right below one address.

    Args:
        url: Such as `s3://bucket/folder`.

    Raises:
        InvalidUsage: The scheme is none of `STORES`, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        scheme = match[1] if match else ""
        if match is None or scheme not in STORES or "::" in url or not match[2].strip("/"):
            raise InvalidUsage(
                f"`{printable(url)}` is no folder of a store that is known",
                f"use one of {', '.join(f'{name}://BUCKET/FOLDER' for name in STORES)}",
            )
        try:
            from fsspec.core import url_to_fs

            found: tuple[Any, str] = url_to_fs(url, use_listings_cache=False)
        except ImportError:
            raise InvalidUsage(
                f"{scheme}:// needs the package {STORES[scheme]}, which is not installed",
                'pip install "aiter-prep[remote]"',
            ) from None
        self._fs, root = found
        self._root = root.rstrip("/")
        self.name = url.rstrip("/")

    # --- reading ----------------------------------------------------------------------------

    def list(self) -> dict[str, Promise]:
        """Return size and state of every object of the folder, by name; none where there is none.

        Raises:
            BadSource: It cannot be listed.
        """

        def listing() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            try:
                found: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            return found

        return {
            entry["name"].rsplit("/", 1)[-1]: Promise(int(entry["size"]), version=_version(entry))
            for entry in self._trying(listing)
            if entry["type"] == "file" and not entry["name"].endswith("/")
        }

    def fetch(self, file: str, folder: Path, promise: Promise) -> None:
        """Bring an object into a folder, block by block; go on with what was begun there.

        Raises:
            BadSource: It cannot be had, or is another by now.
        """
        state = hashlib.sha256(promise.version.encode()).hexdigest()[:16]
        partial = folder / partial_file(f"{file}.{state}")
        try:
            with partial.open("ab") as output:
                while (start := output.tell()) < promise.size:
                    output.write(self.read(file, start, min(BLOCK_BYTES, promise.size - start)))
                    if output.tell() == start:
                        raise BadSource(
                            f"`{printable(file)}` ended at byte {start} of {promise.size}",
                            "it changed while it was read",
                        )
                output.flush()
                os.fsync(output.fileno())
            self._check_unchanged(file, promise)
            partial.rename(folder / file)
        except OSError as fault:
            raise BadSource(f"cannot write `{printable(file)}`: {fault.strerror}") from None

    def read(self, file: str, start: int, size: int) -> bytes:
        """Return some bytes of an object, less where it ends.

        Raises:
            BadSource: They cannot be had.
        """
        path = self._path(file)
        data: bytes = self._trying(lambda: self._fs.cat_file(path, start=start, end=start + size))
        return data

    def _check_unchanged(self, file: str, promise: Promise) -> None:
        # listed again, as before: other calls may tell the state of an object in other words
        if self.list().get(file) != promise:
            raise BadSource(
                f"`{printable(file)}` changed while it was read",
                "nothing was made of it: convert again when the source is at rest",
            )

    def _trying(self, call: Callable[[], T]) -> T:
        """Call a store again where it fails, and say in the end what it said."""
        for pause in PAUSES:
            try:
                return call()
            except (FileNotFoundError, PermissionError):  # noqa: PERF203 - a round trip each
                break
            except OSError:
                time.sleep(pause)
        with self._faults(BadSource, "read"):
            return call()

    # --- writing ----------------------------------------------------------------------------

    def put(self, file: str, local: Path) -> Promise:
        """Write a file whole; return what the store says of it now.

        Raises:
            AiterPrepError: It cannot be written, or has another size there.
        """
        with self._faults(AiterPrepError, "write"):
            self._fs.put_file(str(local), self._path(file))
        found, wanted = self.list().get(file), local.stat().st_size
        if found is None or found.size != wanted:
            arrived = "nothing" if found is None else f"{found.size} bytes"
            raise AiterPrepError(
                f"of `{printable(file)}` {arrived} arrived, {wanted} bytes were sent", "push again"
            )
        return found

    def put_bytes(self, file: str, data: bytes) -> None:
        """Write an object of some bytes.

        Raises:
            AiterPrepError: It cannot be written.
        """
        with self._faults(AiterPrepError, "write"):
            self._fs.pipe_file(self._path(file), data)

    def delete(self, file: str) -> None:
        """Delete an object.

        Raises:
            AiterPrepError: It cannot be deleted.
        """
        with self._faults(AiterPrepError, "write"):
            self._fs.rm_file(self._path(file))

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}"

    @contextmanager
    def _faults(self, kind: type[AiterPrepError], doing: str) -> Iterator[None]:
        """Say what a store said; each has errors of its own, and no root of them."""
        try:
            yield
        except AiterPrepError:
            raise
        except Exception as fault:  # noqa: BLE001 - see above
            said = str(fault).strip().partition("\n")[0] or type(fault).__name__
            raise kind(
                f"cannot {doing} `{printable(self.name)}`: {printable(said)}",
                "check the address, and the credentials that the store's own tools use",
            ) from None


class ObjectSource:
    """A checkpoint in an object store, as it was when it was listed.

    Args:
        url: Such as `s3://bucket/folder`.

    Raises:
        BadSource: It cannot be listed.
        InvalidUsage: It is no address of a store that is known.
    """

    def __init__(self, url: str) -> None:
        self._folder = ObjectFolder(url)
        self.name = self._folder.name
        self.revision: str | None = None
        self.files: Mapping[str, Promise] = self._folder.list()
        states = sorted((name, p.size, p.version) for name, p in self.files.items())
        self.state = hashlib.sha256(repr(states).encode()).hexdigest()
        if not self.files:
            raise BadSource(f"`{printable(self.name)}` holds no object", "check the address")

    def fetch(self, file: str, folder: Path) -> None:
        """Bring an object into a folder; go on with what was begun there.

        Raises:
            BadSource: It cannot be had, or is another by now.
        """
        if not (folder / file).exists():
            self._folder.fetch(file, folder, self.files[file])

    def read(self, file: str, start: int, size: int) -> bytes:
        """Return some bytes of an object, less where it ends.

        Raises:
            BadSource: They cannot be had.
        """
        return self._folder.read(file, start, size)


def _version(info: Mapping[str, Any]) -> str:
    return next((f"{key} {info[key]}" for key in _VERSIONS if info.get(key)), "")
