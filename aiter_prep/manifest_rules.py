"""What the fields of a manifest must be to each other, so that nothing trusts one that lies."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule
from aiter_prep.layouts.permutation import REST
from aiter_prep.storage.checkpoint import CONFIG_FILE, MANIFEST_FILE, is_plain_name
from aiter_prep.storage.dtypes import bytes_of, width_of
from aiter_prep.storage.folder import is_weights_name, shard_file
from aiter_prep.storage.header import MAX_AXES, MAX_FILE_BYTES, is_sound_name
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from aiter_prep.layouts.conversions import Conversion
    from aiter_prep.layouts.packing import Packing
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.manifest import Manifest, ShardRecord, SourceSlice, TensorRecord

MAX_RANKS = 4096
MAX_EXPERTS = 1_000_000
MAX_TILE = 2**20
PACKED_BYTES = 4  # packed elements come in fours
EXPERT = "{expert}"


class Contradiction(ValueError):
    """Fields of a manifest contradict each other."""


def check_manifest(manifest: Manifest) -> None:
    """Check what no schema can say.

    After it, reading every tensor takes no more memory than the tensors themselves, leads to no
    file outside the folder, and needs nothing that this program does not have.

    Raises:
        Contradiction: It does not hold.
    """
    ranks = _check_ranks(manifest)
    shards = _check_shards(manifest, ranks)
    _check_files(manifest)
    layouts = {name: manifest.layout(name) for name in manifest.layouts}
    for layout in layouts.values():
        _check_layout(layout)
    _check_distinct("tensor", ((record.rank, record.name) for record in manifest.tensors))
    for record in manifest.tensors:
        _require(is_sound_name(record.name), f"the name `{printable(record.name)}`")
        _Tensor(manifest, record).check(shards.get(record.file), layouts)
    _check_sources(manifest)
    _require(all(is_sound_name(e["name"]) for e in manifest.skipped), "a name of `skipped`")


# Tables of functions over numpy's arrays: most manifests name nothing of them, and are read in less
# time than it takes to import numpy.


def _merges() -> Mapping[str, object]:
    from aiter_prep.layouts.merges import MERGES

    return MERGES


def _packings() -> Mapping[str, Packing]:
    from aiter_prep.layouts.packing import PACKINGS

    return PACKINGS


def _conversions() -> Mapping[str, Conversion]:
    from aiter_prep.layouts.conversions import CONVERSIONS

    return CONVERSIONS


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 - the very thing that is required
    if not holds:
        raise Contradiction(f"{what}: this contradicts the rest of it")


def _check_distinct(what: str, items: Iterable[object]) -> None:
    seen: set[object] = set()
    for item in items:
        _require(item not in seen, f"{what} {printable(repr(item))} twice")
        seen.add(item)


def _check_ranks(manifest: Manifest) -> frozenset[int]:
    count = manifest.target["tp"] * manifest.target["ep"]
    ranks = manifest.target["ranks"]
    _require(count <= MAX_RANKS, f"{count} ranks")
    _require(max(ranks) < count, f"rank {max(ranks)} of {count}")
    return frozenset(ranks)


def _check_shards(manifest: Manifest, ranks: frozenset[int]) -> dict[str, ShardRecord]:
    _check_distinct("shard", (shard.file for shard in manifest.shards))
    for shard in manifest.shards:
        _require(shard.file == shard_file(shard.rank, shard.part), f"`{shard.file}` so")
        _require(shard.rank is None or shard.rank in ranks, f"`{shard.file}` without its rank")
    return {shard.file: shard for shard in manifest.shards}


def _check_files(manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    _check_distinct("file", names)
    for name in names:
        # `restore` would write it over a shard of its own, and a stock loader would open it
        is_taken = name == MANIFEST_FILE or is_weights_name(name)
        _require(is_plain_name(name) and not is_taken, f"the file `{printable(name)}`")
    _require(CONFIG_FILE in names, f"a folder without `{CONFIG_FILE}`")


def _check_layout(layout: Layout) -> None:
    digits = (*layout.rows, *layout.columns)
    what = f"layout `{layout.name}`"
    _require(sorted(layout.order) == list(range(len(digits))), f"{what}: its order")
    for radices in (layout.rows, layout.columns):
        known = prod(radix for radix in radices if radix != REST)
        _require(radices.count(REST) <= 1 and 1 <= known <= MAX_TILE, f"{what}: its digits")


class _Tensor:
    """The checks of one record."""

    def __init__(self, manifest: Manifest, record: TensorRecord) -> None:
        self._manifest = manifest
        self._record = record
        rank = "" if record.rank is None else f" of rank {record.rank}"
        self._what = f"`{printable(record.name)}`{rank}"

    def check(self, shard: ShardRecord | None, layouts: dict[str, Layout]) -> None:
        record = self._record
        self._require(shard is not None and shard.rank == record.rank, "its shard")
        assert shard is not None
        total = self._bytes(record.dtype, record.shape)
        self._require(total <= shard.size, "its size")
        if record.rank is None:
            self._require(record.logical_shape == record.shape, "its logical shape")
            return
        layout = layouts.get(record.layout or "")
        self._require(layout is not None, f"layout `{record.layout}`, not described")
        assert layout is not None
        assert record.matrix is not None
        assert record.experts is not None
        self._require(record.is_shuffled == layout.is_shuffled, "its flag")
        self._known(record.merge, _merges)
        self._known(record.packing, _packings)
        experts = range(*record.experts)
        self._require(0 < len(experts) <= MAX_EXPERTS and experts[-1] < MAX_EXPERTS, "its experts")
        self._check_matrix(layout, len(experts), total)
        for item in record.source:
            self._check_slice(item, experts[-1])
        self._check_lost(len(experts) * record.matrix[0] * record.matrix[1])

    def _require(self, holds: bool, what: str) -> None:  # noqa: FBT001 - as above
        if not holds:
            raise Contradiction(f"{self._what}: {what} contradicts the rest of it")

    def _known(self, name: str | None, table: Callable[[], Mapping[str, object]]) -> None:
        """Check that a change of values is described, and one that this program can undo."""
        if name is not None:
            self._require(name in self._manifest.conversions, f"`{name}`, not described")
            if name not in table():
                raise Contradiction(
                    f"{self._what}: `{name}` is not known to this version of aiter-prep"
                )

    def _bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        self._require(len(shape) <= MAX_AXES, f"{len(shape)} axes")
        total = bytes_of(dtype, shape)
        self._require(total is not None and total <= MAX_FILE_BYTES, "its size")
        return total or 0

    def _check_matrix(self, layout: Layout, experts: int, total: int) -> None:
        """Check that the experts' matrices are what the tensor consists of."""
        assert self._record.matrix is not None
        rows, row_bytes, filled = self._record.matrix
        self._require(rows > 0 and 0 < filled <= row_bytes, "its matrix")
        if self._record.form == "scalar":
            return
        try:
            layout.radices(rows, row_bytes)
        except NoRule as fault:
            raise Contradiction(f"{self._what}: {fault.message}") from None
        ratio = _packings()[self._record.packing].ratio if self._record.packing else 1
        unit = ratio * PACKED_BYTES if self._record.packing else 1
        self._require(rows * row_bytes % unit == 0, "its packing")
        stored = rows * row_bytes // ratio * experts
        is_padded = self._record.form == "folded"
        self._require(stored == total or (is_padded and stored < total), "its matrix")

    def _check_slice(self, item: SourceSlice, last_expert: int) -> None:
        """Check that a slice lies in its source tensor and in the stored matrix."""
        assert self._record.matrix is not None
        rows, _, filled = self._record.matrix
        self._check_pattern(item)
        self._bytes(item.dtype, item.shape)
        shape = item.shape[1:] if item.fused else item.shape
        if item.fused:
            self._require(len(item.shape) > 1 and last_expert < item.shape[0], "a source's shape")
        shape = shape[::-1] if item.transposed else shape
        in_source = range(*item.rows)
        self._require(0 < len(in_source) <= rows - item.to_row, "rows of a source")
        self._require(in_source[-1] < (shape[0] if shape else 1), "rows of a source")
        self._require(item.row_bytes == prod(shape[1:]) * width_of(item.dtype), "bytes of a row")
        first, last = item.columns
        self._require(first < last <= item.row_bytes, "columns of a source")
        self._known(item.conversion, _conversions)
        width = last - first
        if item.conversion is not None:
            conversion = _conversions()[item.conversion]
            self._require(width % conversion.source_bytes == 0, "columns of a source")
            width = width // conversion.source_bytes * conversion.stored_bytes
        self._require(width <= filled, "columns of a source")

    def _check_pattern(self, item: SourceSlice) -> None:
        plain = item.pattern if item.fused else item.pattern.replace(EXPERT, "", 1)
        is_marked = item.fused or EXPERT in item.pattern
        names = (item.pattern, item.shared or "x")
        is_sound = all(map(is_sound_name, names)) and not set(plain) & set("{}")
        self._require(is_marked and is_sound, f"the pattern `{printable(item.pattern)}`")

    def _check_lost(self, size: int) -> None:
        lost, source = self._record.lost, self._record.source
        if lost is None:
            return
        is_converted = bool(source) and all(item.conversion is not None for item in source)
        self._require(is_converted, "a loss without a conversion")
        if lost.positions is not None:
            ordered = sorted(set(lost.positions))
            self._require(list(lost.positions) == ordered, "its lost positions")
            self._require(len(ordered) == lost.count and ordered[-1] < size, "its lost positions")


def _check_sources(manifest: Manifest) -> None:
    """Check that all ranks say the same of every source tensor."""
    known: dict[str, tuple[object, ...]] = {}
    for record in manifest.tensors:
        for item in record.source:
            kind = (item.dtype, item.shape, item.fused, item.shared, item.transposed)
            is_alike = known.setdefault(item.pattern, kind) == kind
            _require(is_alike, f"two kinds of `{printable(item.pattern)}`")
