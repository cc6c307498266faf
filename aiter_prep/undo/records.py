"""What a prepared folder was made of, as its manifest says."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from aiter_prep.errors import DataMismatch, NoRule
from aiter_prep.storage.dtypes import width_of
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiter_prep.manifest import Manifest, SourceSlice, TensorRecord


class DamagedTensor(DataMismatch):
    """A tensor of a prepared folder is not what its manifest says.

    Args:
        record: The tensor.
        message: What is wrong.
    """

    def __init__(self, record: TensorRecord, message: str) -> None:
        super().__init__(message, "`aiter-prep verify` lists all that is damaged")
        self.record = record


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor as the source has it.

    Attributes:
        name: Its name.
        dtype: safetensors dtype.
        shape: Elements along each axis.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Size of the data."""
        return prod(self.shape) * width_of(self.dtype)


@dataclass(frozen=True, slots=True)
class StackRecord:
    """The records of one name on all ranks, in the order of the ranks."""

    name: str
    records: tuple[TensorRecord, ...]


def stacks_of(manifest: Manifest) -> list[StackRecord]:
    """Return the prepared tensors of a manifest that can be undone, grouped by name."""
    groups: dict[str, list[TensorRecord]] = defaultdict(list)
    lossy = {record.name for record in manifest.lossy}
    for record in manifest.tensors:
        if record.rank is not None and record.name not in lossy:
            groups[record.name].append(record)
    return [
        StackRecord(name, tuple(sorted(records, key=lambda r: r.rank or 0)))
        for name, records in groups.items()
    ]


def source_tensors(stack: StackRecord) -> dict[str, SourceTensor]:
    """Return the source tensors that a stack was made of, by name."""
    found: dict[str, SourceTensor] = {}
    for record in stack.records:
        for item in record.source:
            for expert in experts_of(record):
                name = tensor_name(record, item, expert)
                found.setdefault(name, SourceTensor(name, item.dtype, item.shape))
    return found


def tensor_name(record: TensorRecord, item: SourceSlice, expert: int) -> str:
    """Return the name of the source tensor that holds an expert."""
    if item.shared is not None and expert == experts_of(record)[-1]:
        return item.shared
    return item.pattern if item.fused else item.pattern.replace("{expert}", str(expert))


def experts_of(record: TensorRecord) -> range:
    """Return the global ids of the experts of a prepared tensor, in stored order.

    Raises:
        DataMismatch: The manifest names none.
    """
    if record.experts is None:
        raise DataMismatch(f"the manifest names no experts for `{record.name}`")
    return range(*record.experts)


def require_all_ranks(manifest: Manifest, what: str) -> None:
    """Check that the folder holds every rank.

    Raises:
        NoRule: It was written for some ranks only.
    """
    ranks = manifest.target["ranks"]
    count = manifest.target["tp"] * manifest.target["ep"]
    if len(ranks) != count:
        raise NoRule(
            f"{what} needs all {count} ranks, but this folder holds only {ranks}",
            "convert again without --ranks",
        )


def require_lossless(manifest: Manifest) -> None:
    """Check that every tensor can be undone.

    Raises:
        NoRule: One cannot.
    """
    if manifest.lossy:
        record = manifest.lossy[0]
        how = manifest.conversions.get(record.merge or "", "one value stands for many")
        raise NoRule(
            f"`{printable(record.name)}` cannot be undone: {how} ({len(manifest.lossy)} such)",
            "keep the source: it is the only way back",
        )


def common_records(manifest: Manifest) -> Sequence[TensorRecord]:
    """Return the records of the tensors that every rank has."""
    return [record for record in manifest.tensors if record.rank is None]


def accounted(manifest: Manifest) -> Mapping[str, SourceTensor]:
    """Return every source tensor that the folder was made of, by name."""
    found: dict[str, SourceTensor] = {}
    for record in manifest.tensors:
        if record.rank is not None:
            for name, tensor in source_tensors(StackRecord(record.name, (record,))).items():
                if found.setdefault(name, tensor) != tensor:
                    raise DataMismatch(f"the manifest knows two kinds of `{printable(name)}`")
    for record in common_records(manifest):
        if record.name in found:
            raise DataMismatch(f"the manifest knows two kinds of `{printable(record.name)}`")
        found[record.name] = SourceTensor(record.name, record.dtype, record.shape)
    return found
