"""Compares a prepared folder with its manifest."""

from __future__ import annotations

import hashlib
import os
import threading
from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError, BadSource
from aiter_prep.manifest import MAX_MANIFEST_BYTES
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.digest import Digest, digest_of, tree_digest
from aiter_prep.storage.files import LEADS_OUT, leaves_folder, read_whole
from aiter_prep.storage.folder import HUB_FILES, JOURNAL_FILE, LOCK_FILE, PARTS_FOLDER
from aiter_prep.storage.header import read_header
from aiter_prep.storage.reader import CHUNK_BYTES, FolderReader, chunks
from aiter_prep.verification.findings import OTHER_BYTES, problem_with
from aiter_prep.verification.report import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from aiter_prep.manifest import Manifest, ShardRecord, TensorRecord
    from aiter_prep.storage.header import Header, TensorInfo
    from aiter_prep.verification.findings import Findings


class StoredCheck:
    """The checks that need the folder alone.

    Args:
        findings: Where to note what is wrong.
        with_sha256: Compute the SHA-256 of every file from what is read anyway.
    """

    def __init__(self, findings: Findings, *, with_sha256: bool) -> None:
        self._findings = findings
        self._folder = findings.folder
        self._manifest: Manifest = findings.manifest
        self._with_sha256 = with_sha256
        self.sha256: dict[str, str] = {}
        self._thread = threading.local()
        self._sound: list[tuple[Header, dict[str, TensorRecord]]] = []
        self._stamps: dict[str, tuple[int, int, int] | None] = {}

    def names(self) -> None:
        """Compare the names in the folder with the manifest, in both directions."""
        promised = {shard.file for shard in self._manifest.shards}
        promised |= {file.name for file in self._manifest.files}
        self._stamps = {path.name: _stamp(path) for path in self._folder.iterdir()}
        # a kill right behind the manifest leaves what a run notes for itself, and a download from
        # the Hub leaves its own; they hold nothing of the model
        ours = {MANIFEST_FILE, JOURNAL_FILE, LOCK_FILE, PARTS_FOLDER}
        found = self._stamps.keys() - {*ours, *HUB_FILES}
        for name in sorted(promised - found):
            self._findings.add(name, "is missing")
        for name in sorted(found - promised):
            self._findings.add(name, "is not named by the manifest")

    def headers(self) -> None:
        """Check every shard but for its data: size, header, names."""
        in_shard: dict[str, dict[str, TensorRecord]] = {s.file: {} for s in self._manifest.shards}
        for record in self._manifest.tensors:
            if record.file not in in_shard:
                self._findings.add(record.file, "is named by a tensor, but not as a shard", record)
            else:
                in_shard[record.file][record.name] = record
        for shard in self._manifest.shards:
            if self._is_there(shard.file):
                header = self._header(shard, in_shard[shard.file])
                if header is not None:
                    self._sound.append((header, in_shard[shard.file]))

    def data(self, *, only_lossy: bool = False) -> None:
        """Check the digest of every tensor of the shards whose headers can be read.

        Args:
            only_lossy: Leave out those that are to be undone, which reads and digests them, too.
        """
        lossy = {(record.file, record.name) for record in self._manifest.lossy}
        with FolderReader(self._folder) as reader:
            # a SHA-256 takes the bytes of a file in order, so a thread takes a whole file
            pieces = [
                (header, piece, records)
                for header, records in self._sound
                for piece in ([header.tensors] if self._with_sha256 else _singles(header))
                if not only_lossy or (header.file, piece[0].name) in lossy
            ]
            self._findings.spread(lambda piece: self._data(reader, *piece), pieces)

    def files(self) -> None:
        """Check the files beside the shards."""
        for file in self._manifest.files:
            if not self._is_there(file.name):
                continue
            try:
                data = read_whole(self._folder / file.name, file.size)
            except OSError as fault:
                self._findings.add(
                    file.name, f"cannot be read as the manifest says: {fault.strerror}"
                )
                continue
            self._findings.advance(len(data))
            self._note_sha256(file.name, data)
            if (len(data), digest_of(data)) != (file.size, file.digest):
                self._findings.add(file.name, OTHER_BYTES)

    def manifest_file(self) -> None:
        """Check the text of the manifest: its own digest stands for what it says, not for that."""
        data = read_whole(self._folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
        self._note_sha256(MANIFEST_FILE, data)
        if data != self._manifest.to_json():
            self._findings.add(MANIFEST_FILE, "is spelled otherwise than it was written")

    def unchanged(self) -> None:
        """Check that nobody has written into the folder since its names were compared.

        Each was read piece by piece: what was read of a file that changes meanwhile may never have
        lain there as a whole.
        """
        for name, stamp in self._stamps.items():
            if _stamp(self._folder / name) != stamp:
                self._findings.add(name, "changed while it was read")

    def _is_there(self, name: str) -> bool:
        """Return whether a file is to be read; a link to nowhere is, and is damage."""
        path = self._folder / name
        if leaves_folder(path):
            self._findings.add(name, LEADS_OUT)
            return False
        return os.path.lexists(path)

    def _note_sha256(self, name: str, data: bytes) -> None:
        if self._with_sha256:
            self.sha256[name] = hashlib.sha256(data).hexdigest()

    def _header(self, shard: ShardRecord, records: dict[str, TensorRecord]) -> Header | None:
        """Check all of a shard but its data; return its header if it can be read."""
        try:
            header = read_header(self._folder / shard.file)
        except AiterPrepError as fault:
            self._findings.add(shard.file, fault.message)
            return None
        if header.file_bytes != shard.size:
            self._findings.add(shard.file, f"has {header.file_bytes} bytes, not {shard.size}")
        if header.digest != shard.header_digest:
            self._findings.add(shard.file, "has another header than the manifest says")
        self._headers(header, records)
        promised = [records[t.name].digest for t in header.tensors if t.name in records]
        if tree_digest(shard.header_digest, promised) != shard.digest:
            self._findings.add(shard.file, "the digests of its tensors do not add up to its own")
        return header

    def _data(
        self,
        reader: FolderReader,
        header: Header,
        infos: Sequence[TensorInfo],
        records: dict[str, TensorRecord],
    ) -> list[Problem]:
        """Check the digests of some tensors of a shard, in the order in which they lie."""
        sha256 = hashlib.sha256() if self._with_sha256 else None
        if sha256 is not None:
            start = min((info.start for info in header.tensors), default=header.file_bytes)
            head = bytearray(start)
            reader.read_into(header.file, 0, head)
            sha256.update(head)
        found = [
            self._tensor(info, records[info.name], reader, sha256)
            for info in infos
            if info.name in records
        ]
        if sha256 is not None:
            self.sha256[header.file] = sha256.hexdigest()
        return [problem for problem in found if problem is not None]

    def _buffer(self) -> bytearray:
        """Return this thread's buffer; fresh memory costs a page fault every 4 KiB."""
        if not hasattr(self._thread, "buffer"):
            self._thread.buffer = bytearray(CHUNK_BYTES)
        buffer: bytearray = self._thread.buffer
        return buffer

    def _headers(self, header: Header, records: dict[str, TensorRecord]) -> None:
        infos = {info.name: info for info in header.tensors}
        for name in sorted(records.keys() - infos.keys()):
            self._findings.add(header.file, "is missing in the header", records[name])
        for name in sorted(infos.keys() - records.keys()):
            self._findings.problems.append(
                Problem(header.file, name, None, "is in the shard, but not in the manifest")
            )
        for name in sorted(infos.keys() & records.keys()):
            info, record = infos[name], records[name]
            if (info.dtype, info.shape) != (record.dtype, record.shape):
                self._findings.add(
                    header.file,
                    f"is {info.dtype} {list(info.shape)}, not {record.dtype} {list(record.shape)}",
                    record,
                )

    def _tensor(
        self,
        info: TensorInfo,
        record: TensorRecord,
        reader: FolderReader,
        sha256: hashlib._Hash | None,
    ) -> Problem | None:
        digest = Digest()
        try:
            for _, data in chunks(info, reader, self._buffer()):
                digest.update(data)
                if sha256 is not None:
                    sha256.update(data)
                self._findings.advance(data.nbytes)
        except BadSource as fault:
            return problem_with(info.file, fault.message, record)
        if digest.text() != record.digest:
            return problem_with(info.file, OTHER_BYTES, record)
        return None


def _singles(header: Header) -> Iterator[Sequence[TensorInfo]]:
    return ((info,) for info in header.tensors)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return size and times of a file, or None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
