"""Makes a Hugging Face checkpoint of a prepared folder again."""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import (
    AiterPrepError,
    BadSource,
    DataMismatch,
    Interrupted,
    InvalidUsage,
    OutputNotEmpty,
)
from aiter_prep.families.blocks import natural_key
from aiter_prep.manifest import read_manifest
from aiter_prep.progress import Progress
from aiter_prep.storage import jsontext
from aiter_prep.storage.checkpoint import CONFIG_FILE, INDEX_FILE, METHOD, SINGLE_FILE
from aiter_prep.storage.digest import Digest, digest_of
from aiter_prep.storage.durable import sync_folder, write_whole
from aiter_prep.storage.files import local_path, read_whole
from aiter_prep.storage.folder import LOCK_FILE
from aiter_prep.storage.guards import lock_folder
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import ShardFile
from aiter_prep.storage.reader import FolderReader, chunks
from aiter_prep.storage.shard import ShardLayout, lay_out_shard
from aiter_prep.storage.threads import checked_workers, spread
from aiter_prep.undo import (
    BadPadding,
    SourceTensor,
    Undoer,
    accounted,
    common_records,
    require_all_ranks,
    require_lossless,
    stacks_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from aiter_prep.manifest import Manifest, TensorRecord
    from aiter_prep.storage.buffers import Bytes
    from aiter_prep.undo import StackRecord

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` wrote.

    Attributes:
        folder: The checkpoint.
        tensors: Tensors in it.
        shards: Shards in it.
        total_bytes: Bytes of all tensors.
        notes: What is not exactly as in the source.
    """

    folder: Path
    tensors: int
    shards: int
    total_bytes: int
    notes: tuple[str, ...] = ()


def restore(
    folder: str | Path,
    out: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Restored:
    """Write a Hugging Face checkpoint that holds what the source of a prepared folder held.

    Every tensor has its name, dtype, shape and bytes again; how they are spread over shards may
    differ. What a conversion lost is in the notes. The digests of the manifest are checked on the
    way, and nothing stands under the name `out` before all is written.

    Args:
        folder: The prepared folder, with all ranks.
        out: The folder to write; it must not exist, or be empty.
        max_shard_bytes: Limit for the data of a shard.
        workers: Threads; one per usable core by default.
        progress: Called now and then.

    Raises:
        InvalidUsage: There are too many workers, or a folder is an address or has no name.
        DataMismatch: The folder is damaged.
        NoRule: The folder holds some ranks only.
        OutputNotEmpty: `out` holds something.
        AiterPrepError: The disk is full or fails.
    """
    folder = local_path(folder, "the prepared folder", "fetch it first")
    out = local_path(out, "the folder to write", "write to a local folder first")
    threads = checked_workers(workers)
    manifest = read_manifest(folder)
    require_all_ranks(manifest, "restore")
    require_lossless(manifest)
    _check_out(out, folder)
    work = out.resolve().with_name(f".{out.resolve().name}.restore.partial")
    try:
        with _work_folder(work):
            result = _Restoration(folder, manifest, work, max_shard_bytes, threads, progress).run(
                out
            )
            (work / LOCK_FILE).unlink()
            sync_folder(work)
            work.replace(out.resolve())  # a link to an empty folder is one, too
            sync_folder(out.resolve().parent)
    except OSError as fault:
        raise AiterPrepError(
            f"cannot write `{printable(str(out))}`: {fault.strerror}",
            "mend the cause and try again",
        ) from fault
    return result


def _check_out(out: Path, folder: Path) -> None:
    if folder.resolve() in out.resolve().parents:
        raise InvalidUsage(
            f"`{printable(str(out))}` lies in the prepared folder", "choose a folder outside it"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputNotEmpty(
            f"`{printable(str(out))}` holds something already", "choose another output folder"
        )


@contextmanager
def _work_folder(work: Path) -> Iterator[None]:
    """Make an empty folder that no other run writes into, and leave nothing of it behind."""
    work.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(work)
    try:
        for path in work.iterdir():  # of a run that was killed
            if path.name != LOCK_FILE:
                path.unlink()
        yield
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        os.close(lock)


class _Restoration:
    """One run of `restore`."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        work: Path,
        max_shard_bytes: int,
        workers: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._work = work
        self._workers = workers
        self._progress = progress
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._done = 0
        self._tensors = accounted(manifest)
        self._total = sum(tensor.total_bytes for tensor in self._tensors.values())
        self._layouts = list(_shards(list(self._tensors.values()), max_shard_bytes))
        self._place = {name: layout for layout in self._layouts for name in layout.slots}
        self._files: dict[str, ShardFile] = {}
        self._written: dict[str, dict[int, int]] = {name: {} for name in self._tensors}

    def run(self, out: Path) -> Restored:
        try:
            for layout in self._layouts:
                self._files[layout.file] = ShardFile(self._work, layout)
            with FolderReader(self._folder) as reader:
                undoer = Undoer(self._folder, self._manifest, reader)
                stacks, common = stacks_of(self._manifest), common_records(self._manifest)
                jobs = [partial(self._restore_stack, undoer, stack) for stack in stacks]
                jobs += [partial(self._copy, undoer, record, reader) for record in common]
                for _ in spread(lambda job: job(), jobs, self._workers, self._stop):
                    pass
            self._check_whole()
            for file in self._files.values():
                file.finish(self._work)
        finally:
            for file in self._files.values():
                file.close()
        self._write_files()
        return Restored(
            out, len(self._tensors), len(self._layouts), self._total, tuple(self._notes())
        )

    def _restore_stack(self, undoer: Undoer, stack: StackRecord) -> None:
        for found in undoer.undo(stack):
            if isinstance(found, BadPadding):
                raise DataMismatch(
                    f"the padding of `{printable(found.record.name)}` of rank "
                    f"{found.record.rank} is not as it was written",
                    "`aiter-prep verify` lists all that is damaged",
                )
            for (tensor, offset), matrix in zip(found.places, found.matrices, strict=True):
                self._write(tensor.name, offset, matrix)

    def _copy(self, undoer: Undoer, record: TensorRecord, reader: FolderReader) -> None:
        info = undoer.info(record)
        digest = Digest()
        for offset, data in chunks(info, reader):
            digest.update(data)
            self._write(record.name, offset, data)
        if digest.text() != record.digest:
            raise DataMismatch(
                f"`{record.name}` in `{record.file}` has other bytes than the manifest says",
                "`aiter-prep verify` lists all that is damaged",
            )

    def _write(self, name: str, offset: int, data: Bytes) -> None:
        layout = self._place[name]
        if self._stop.is_set():
            raise Interrupted("stopped")
        view = memoryview(data).cast("B")
        self._files[layout.file].write(layout.slots[name].start + offset, view)
        with self._lock:
            if offset in self._written[name]:
                raise DataMismatch(f"the manifest has byte {offset} of `{printable(name)}` twice")
            self._written[name][offset] = view.nbytes
            self._done += view.nbytes
            if self._progress is not None:
                self._progress(Progress(self._done, self._total))

    def _check_whole(self) -> None:
        """Check that no byte of a tensor was left a hole, which would read as zeros.

        Parts of a tensor are all of it, or experts of one size at multiples of it; so their sizes
        add up only if they tile it.
        """
        for name, tensor in self._tensors.items():
            written = sum(self._written[name].values())
            if written != tensor.total_bytes:
                raise DataMismatch(
                    f"the folder holds {written} of the {tensor.total_bytes} bytes of "
                    f"`{printable(name)}`",
                    "`aiter-prep verify --source` says what is missing",
                )

    def _write_files(self) -> None:
        for file in self._manifest.files:
            try:
                data = read_whole(self._folder / file.name, file.size)
            except OSError as fault:
                raise DataMismatch(f"cannot read `{file.name}`: {fault.strerror}") from None
            if digest_of(data) != file.digest:
                raise DataMismatch(f"`{file.name}` has other bytes than the manifest says")
            if file.name == CONFIG_FILE:
                data = _unwrapped(data)
            write_whole(self._work, file.name, data)
        if len(self._layouts) > 1:
            weight_map = {name: layout.file for name, layout in self._place.items()}
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            write_whole(self._work, INDEX_FILE, jsontext.readable(index))

    def _notes(self) -> Iterator[str]:
        for record in self._manifest.tensors:
            if record.lost is not None and record.lost.positions is None:
                yield (
                    f"`{printable(record.name)}` of rank {record.rank} is not exact: "
                    f"{record.lost.count} bytes {record.lost.source:#04x} come back as "
                    f"{record.lost.stored:#04x}, an equal value"
                )
        for entry in self._manifest.skipped:
            yield f"`{printable(entry['name'])}` was left out: {entry['reason']}"


def _unwrapped(text: bytes) -> bytes:
    try:
        config = jsontext.parse_object(text, f"`{CONFIG_FILE}`", allow_nan=True)
        return unwrapped_config(config)
    except BadSource as fault:
        raise DataMismatch(fault.message) from None


def unwrapped_config(config: Mapping[str, Any]) -> bytes:
    """Return the source's `config.json` from a prepared folder's."""
    plain = _unwrap(config)
    text = plain.get("text_config")
    if isinstance(text, dict):
        plain["text_config"] = _unwrap(text)
    return (json.dumps(plain, indent=2) + "\n").encode()


def _unwrap(config: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(config)
    wrapped = plain.get("quantization_config")
    if isinstance(wrapped, dict) and wrapped.get("quant_method") == METHOD:
        plain["quantization_config"] = wrapped.get("source")
        if plain["quantization_config"] is None:
            del plain["quantization_config"]
    return plain


def _shards(tensors: Sequence[SourceTensor], limit: int) -> Iterator[ShardLayout]:
    """Spread tensors over shards, in the order of their names."""
    parts: list[list[SourceTensor]] = [[]]
    filled = 0
    for tensor in sorted(tensors, key=lambda tensor: natural_key(tensor.name)):
        if parts[-1] and filled + tensor.total_bytes > limit:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.total_bytes
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        described = [(tensor.name, tensor.dtype, tensor.shape) for tensor in part]
        yield lay_out_shard(file if len(parts) > 1 else SINGLE_FILE, described, {"format": "pt"})
