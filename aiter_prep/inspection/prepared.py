"""What was done to make a prepared folder, told by its manifest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import DataMismatch
from aiter_prep.inspection.model import compact, split_layer
from aiter_prep.manifest import read_manifest
from aiter_prep.storage.dtypes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiter_prep.manifest import Manifest, TensorRecord


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """Experts modules that were prepared in the same way.

    Attributes:
        experts: Path of the modules, with `{layer}` for the number of the layer.
        layers: The numbers, such as `0-2, 5`.
        modules: How many modules.
        facts: What they have in common: scheme, sizes, padded sizes, row order.
    """

    experts: str
    layers: str
    modules: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RankShards:
    """The shards of one rank.

    Attributes:
        rank: The rank, or None for what all ranks have in common.
        shards: Number of shards.
        tensors: Number of tensors.
        total_bytes: Bytes of the shards.
    """

    rank: int | None
    shards: int
    tensors: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PreparedInspection:
    """What a prepared folder holds.

    Attributes:
        folder: Where it lies.
        source: Name and revision of the source.
        created_by: What wrote it.
        target: What it was made for.
        architecture: Architecture of the model.
        model_type: Its type.
        groups: Its experts modules.
        ranks: Its shards by rank; common ones last.
        total_bytes: Bytes of all shards.
        padding_bytes: Of these, how many are padding.
        layouts: Layout to number of tensors in it.
        conversions: Change of values to what it means.
        skipped: Source tensors that were left out.
        is_lossy: Whether the source cannot be had back.
        lossy_tensors: Number of tensors that cannot be undone.
        missing: Files that the manifest names and the folder does not hold.
    """

    folder: Path
    source: Mapping[str, Any]
    created_by: Mapping[str, Any]
    target: Mapping[str, Any]
    architecture: str
    model_type: str
    groups: tuple[PreparedGroup, ...]
    ranks: tuple[RankShards, ...]
    total_bytes: int
    padding_bytes: int
    layouts: Mapping[str, int]
    conversions: Mapping[str, str]
    skipped: tuple[Mapping[str, str], ...]
    is_lossy: bool
    lossy_tensors: int
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what it says as plain values."""
        return {"kind": "prepared", **asdict(self), "folder": str(self.folder)}


@dataclass(frozen=True, slots=True)
class UnfinishedInspection:
    """A folder that a conversion has begun and not finished.

    Attributes:
        folder: Where it lies.
        shards: Shards that are finished.
        total_bytes: Bytes of these.
    """

    folder: Path
    shards: int
    total_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return what it says as plain values."""
        return {"kind": "unfinished", **asdict(self), "folder": str(self.folder)}


def inspect_prepared(folder: Path) -> PreparedInspection:
    """Tell what a prepared folder holds, from its manifest and the names of its files.

    Raises:
        DataMismatch: The manifest is damaged.
    """
    manifest = read_manifest(folder)
    try:
        return _inspection(folder, manifest)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as fault:
        raise DataMismatch(f"the manifest lacks {fault}") from None


def _inspection(folder: Path, manifest: Manifest) -> PreparedInspection:
    source = {key: manifest.source[key] for key in ("name", "revision")}
    layouts: dict[str, int] = defaultdict(int)
    for record in manifest.tensors:
        if record.layout is not None:
            layouts[record.layout] += 1
    return PreparedInspection(
        folder=folder,
        source=source,
        created_by=manifest.created_by,
        target=manifest.target,
        architecture=str(manifest.model["architecture"]),
        model_type=str(manifest.model["model_type"]),
        groups=_groups(manifest.model["blocks"]),
        ranks=_ranks(manifest),
        total_bytes=sum(shard.size for shard in manifest.shards),
        padding_bytes=sum(padding_of(record) for record in manifest.tensors),
        layouts=dict(sorted(layouts.items())),
        conversions=manifest.conversions,
        skipped=manifest.skipped,
        is_lossy=bool(manifest.lossy),
        lossy_tensors=len(manifest.lossy),
        missing=tuple(name for name in _promised(manifest) if not (folder / name).exists()),
    )


def _promised(manifest: Manifest) -> list[str]:
    shards = [shard.file for shard in manifest.shards]
    return sorted([*shards, *(file.name for file in manifest.files)])


def _groups(blocks: Sequence[Mapping[str, Any]]) -> tuple[PreparedGroup, ...]:
    found: dict[str, list[tuple[int | None, dict[str, Any]]]] = defaultdict(list)
    for block in blocks:
        facts = dict(block)
        path, layer = split_layer(facts.pop("experts"))
        found[repr((path, sorted(facts.items())))].append((layer, {"path": path, **facts}))
    return tuple(
        PreparedGroup(
            experts=members[0][1].pop("path"),
            layers=compact(layer for layer, _ in members if layer is not None),
            modules=len(members),
            facts=members[0][1],
        )
        for members in found.values()
    )


def _ranks(manifest: Manifest) -> tuple[RankShards, ...]:
    shards: dict[int | None, list[int]] = defaultdict(list)
    tensors: dict[int | None, int] = defaultdict(int)
    for shard in manifest.shards:
        shards[shard.rank].append(shard.size)
    for record in manifest.tensors:
        tensors[record.rank] += 1
    order = sorted(shards, key=lambda rank: (rank is None, rank or 0))
    return tuple(RankShards(r, len(shards[r]), tensors[r], sum(shards[r])) for r in order)


def padding_of(record: TensorRecord) -> int:
    """Return the bytes of a tensor that are padding: its pads say how much of each axis is."""
    stored = bytes_of(record.dtype, record.shape) or 0
    filled = prod((Fraction(pad.start, pad.stop) for pad in record.pads), start=Fraction(1))
    return int(stored * (1 - filled))
