"""The header of a safetensors file, read with suspicion."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from aiter_prep.errors import BadSource, NoRule
from aiter_prep.storage import jsontext
from aiter_prep.storage.digest import digest_of
from aiter_prep.storage.dtypes import bytes_of
from aiter_prep.storage.jsontext import printable, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# safetensors itself refuses more: safetensors/src/tensor.rs::MAX_HEADER_SIZE
MAX_HEADER_BYTES = 100_000_000
PREFIX_BYTES = 8
MAX_DIMENSION = 2**48
MAX_AXES = 32
MAX_FILE_BYTES = 2**63 - 1
MAX_OFFSET = 2**127  # larger ones are not worth a message of their own
MAX_NAME = 1024


class TensorInfo(NamedTuple):
    """One tensor of a shard; a tuple, for a checkpoint has a hundred thousand.

    Attributes:
        name: The tensor's name.
        dtype: safetensors dtype name.
        shape: Elements along each axis.
        file: Name of the shard in its folder.
        start: Offset of the first byte in the file.
        total_bytes: Size of the data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of one shard says.

    Attributes:
        file: Name of the shard.
        file_bytes: Size of the file.
        mtime_ns: When the file was last changed, in nanoseconds since the epoch; a copy may keep
            the time of its original.
        ctime_ns: When the file, its name or its place was last changed, as the system alone notes.
        digest: Digest of the header's bytes, its length prefix included.
        metadata: The `__metadata__` object.
        tensors: The tensors in the order of their offsets.
    """

    file: str
    file_bytes: int
    mtime_ns: int
    ctime_ns: int
    digest: str
    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Every tensor's size follows from its dtype and shape, the tensors fill the data exactly, with
    no hole and no overlap, and the file ends where the last one ends.

    Raises:
        BadSource: The file is missing, truncated, or its header lies.
        NoRule: A dtype is not known.
    """
    raw, status = _read_raw(path)
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return parse_header(raw, path.name, status.st_size, times)


def parse_header(raw: bytes, file: str, file_bytes: int, times: tuple[int, int] = (0, 0)) -> Header:
    """Check the header of a safetensors file whose bytes may lie elsewhere.

    Args:
        raw: The header, its length prefix included.
        file: Name of the file.
        file_bytes: Size of the file.
        times: Its `mtime_ns` and `ctime_ns`, where they mean something.

    Raises:
        BadSource: It lies.
        NoRule: A dtype is not known.
    """
    what = f"the header of `{printable(file)}`"
    entries = jsontext.parse_object(raw[PREFIX_BYTES:], what)
    metadata = _metadata(entries.pop("__metadata__", {}), what)
    tensors = [_tensor(name, entry, file, len(raw)) for name, entry in entries.items()]
    tensors.sort(key=attrgetter("start", "total_bytes"))
    _check_tiling(tensors, len(raw), file_bytes, file)
    return Header(
        file=file,
        file_bytes=file_bytes,
        mtime_ns=times[0],
        ctime_ns=times[1],
        digest=digest_of(raw),
        metadata=metadata,
        tensors=tuple(tensors),
    )


def _read_raw(path: Path) -> tuple[bytes, os.stat_result]:
    """Return the header with its length prefix, and the status of the file."""
    name = printable(path.name)
    try:
        if not path.is_file():
            kind = "is not a regular file" if path.exists() else "is missing"
            raise BadSource(f"shard `{name}` {kind}")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            prefix = file.read(PREFIX_BYTES)
            length = header_length(prefix, status.st_size, name)
            raw = prefix + file.read(length)
    except OSError as fault:
        raise BadSource(f"cannot read shard `{name}`: {fault.strerror}") from None
    if len(raw) != PREFIX_BYTES + length:
        raise BadSource(f"shard `{name}` ended inside its header", "download it again")
    return raw, status


def header_length(prefix: bytes, file_bytes: int, name: str) -> int:
    """Return the bytes of a header behind its length prefix.

    Args:
        prefix: The first `PREFIX_BYTES` of the file.
        file_bytes: Size of the file.
        name: What to call the file.

    Raises:
        BadSource: The file has no room for it, or it is larger than any.
    """
    if len(prefix) < PREFIX_BYTES:
        raise BadSource(
            f"shard `{name}` is truncated: {file_bytes} bytes cannot hold a header",
            "download it again",
        )
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_HEADER_BYTES:
        raise BadSource(
            f"the header of `{name}` says it is {length} bytes long, the limit is "
            f"{MAX_HEADER_BYTES}",
            "the file is no safetensors file, or it is damaged",
        )
    if length > file_bytes - PREFIX_BYTES:
        raise BadSource(
            f"the header of `{name}` says it is {length} bytes long, but the file has only "
            f"{file_bytes} bytes",
            "the file is truncated or damaged: download it again",
        )
    return length


def _metadata(value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise BadSource(f"{what} has a `__metadata__` that is not an object of strings")
    return value


def _tensor(name: str, entry: Any, file: str, data_start: int) -> TensorInfo:
    if not is_sound_name(name):
        raise _refusal(
            name,
            file,
            f"has a name that cannot be trusted: {len(name)} characters; at most {MAX_NAME}, and "
            "no control characters, are allowed",
        )
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        begin, end = offsets
    except (KeyError, TypeError, ValueError):
        raise _refusal(name, file, "lacks a dtype, a shape or two data offsets") from None
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(entry) != len(_FIELDS):
        raise _refusal(name, file, "has fields of the wrong kind")
    for number in shape:
        if type(number) is not int or not 0 <= number <= MAX_DIMENSION:
            raise _refusal(name, file, f"has the impossible shape {shown(shape)}")
    if len(shape) > MAX_AXES:
        raise _refusal(name, file, f"has {len(shape)} axes, the limit is {MAX_AXES}")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= MAX_OFFSET:
        raise _refusal(name, file, f"has impossible offsets {shown(offsets)}")
    sizes = tuple(shape)
    try:
        expected = bytes_of(dtype, sizes)
    except NoRule as fault:
        where = _where(name, file)
        raise NoRule(f"{where}: {printable(fault.message)}", fault.hint) from None
    if expected != end - begin:
        takes = "more than any file has" if (expected or 0) > MAX_FILE_BYTES else expected
        raise _refusal(
            name, file, f"has {end - begin} bytes, but {dtype} {shown(shape)} takes {takes}"
        )
    return TensorInfo(name, dtype, sizes, file, data_start + begin, end - begin)


def _refusal(name: str, file: str, fault: str) -> BadSource:
    return BadSource(f"{_where(name, file)} {fault}")


def _where(name: str, file: str) -> str:
    return f"tensor `{printable(name)}` in `{printable(file)}`"


def is_sound_name(name: str) -> bool:
    """Return whether a tensor may be called so: not too long, and safe on a terminal."""
    return len(name) <= MAX_NAME and name.isprintable()


_FIELDS = ("dtype", "shape", "data_offsets")


def _check_tiling(tensors: list[TensorInfo], data_start: int, file_bytes: int, file: str) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            kind = "overlaps the one before it" if tensor.start < position else "follows a hole"
            raise BadSource(
                f"tensor `{printable(tensor.name)}` in `{printable(file)}` {kind}: it starts at "
                f"byte {tensor.start}, not {position}"
            )
        position += tensor.total_bytes
    if position != file_bytes:
        kind = "is truncated" if file_bytes < position else "has bytes after its last tensor"
        raise BadSource(
            f"shard `{printable(file)}` {kind}: {file_bytes} bytes, its header says {position}",
            "download it again",
        )
