"""The ways to bring the tensors of a prepared folder into memory, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from aiter_prep.engines.reading import check_digest, read_tensors
from aiter_prep.errors import AiterPrepError, InvalidUsage
from aiter_prep.storage.digest import digest_of
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from aiter_prep.engines.reading import Destination

Reader: TypeAlias = "Callable[[Path, Sequence[Destination]], None]"

DIRECT = "direct"


def read(
    folder: Path,
    destinations: Sequence[Destination],
    *,
    reader: str = DIRECT,
    check_digests: bool = False,
) -> None:
    """Fill memory with the bytes of tensors.

    Args:
        folder: The prepared folder.
        destinations: What to read, and where to; the memory of each is as long as its tensor.
        reader: A name of the table.
        check_digests: Compare what is in memory with the digests of the manifest.

    Raises:
        InvalidUsage: There is no such reader.
        AiterPrepError: The package of the reader is not installed.
        DataMismatch: A file is cut short, or a digest is not what the manifest says.
    """
    if reader == DIRECT:  # it takes the digests while the bytes pass by
        read_tensors(folder, destinations, check_digests=check_digests)
        return
    if reader not in READERS:
        known = ", ".join([DIRECT, *READERS])
        raise InvalidUsage(f"there is no reader `{printable(reader)}`", f"use one of {known}")
    READERS[reader](folder, [pair for pair in destinations if pair[0].total_bytes])
    if check_digests:
        for stored, memory in destinations:
            check_digest(stored.record, digest_of(memory.cpu().numpy()))


def _fastsafetensors(folder: Path, destinations: Sequence[Destination]) -> None:
    """Fill memory through buffers of fastsafetensors on the same device, one device at a time."""
    package = _package("fastsafetensors", "fastsafetensors")
    for device in {str(memory.device) for _, memory in destinations}:
        pairs = [pair for pair in destinations if str(pair[1].device) == device]
        names = {stored.record.name for stored, _ in pairs}
        files = sorted({str(folder / stored.record.file) for stored, _ in pairs})
        loader = package.SafeTensorsFileLoader(None, device, nogds=True)
        try:
            loader.set_tensor_filter(names.__contains__)
            loader.add_filenames({0: files})
            buffers = loader.copy_files_to_device()
            try:
                for stored, memory in pairs:
                    tensor = buffers.get_tensor(stored.record.name)
                    memory.copy_(tensor.reshape(-1).view(torch.uint8))
            finally:
                buffers.close()
        finally:
            loader.close()


def _runai_streamer(folder: Path, destinations: Sequence[Destination]) -> None:
    """Fill memory from the buffers that Run:ai's streamer reads into, in the order they come."""
    package = _package("runai_model_streamer", "runai-model-streamer")
    by_file: dict[str, list[Destination]] = {}
    for pair in destinations:
        by_file.setdefault(pair[0].record.file, []).append(pair)
    files = list(by_file.items())
    requests = [
        package.FileChunks(
            number,
            str(folder / file),
            [stored.start for stored, _ in pairs],
            [stored.total_bytes for stored, _ in pairs],
        )
        for number, (file, pairs) in enumerate(files)
    ]
    with package.FileStreamer() as streamer:
        streamer.stream_files(requests, device="cpu")
        for number, index, part in streamer.get_chunks():
            files[number][1][index][1].copy_(part.reshape(-1))


READERS: dict[str, Reader] = {
    "fastsafetensors": _fastsafetensors,
    "runai_streamer": _runai_streamer,
}
"""Readers of other packages; our own, `direct`, has no package and no buffer in between."""


def _package(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        raise AiterPrepError(
            f"the package `{distribution}` is not installed: {fault}",
            f"`pip install aiter-prep[readers]`, or leave the reader at `{DIRECT}`",
        ) from None
