"""How many bytes are what, and where: by layer and role, by number of ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiter_prep.inspection.prepared import padding_of
from aiter_prep.inspection.source import role_of_tensor
from aiter_prep.storage.dtypes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiter_prep.manifest import Manifest, TensorRecord
    from aiter_prep.storage.checkpoint import Checkpoint

PADDING = "padding"
WEIGHTS, SCALES, OTHERS, COMMON = (
    "expert weights",
    "expert scales",
    "other expert tensors",
    "common",
)
# roles of prepared tensors
_PARTS = {
    "weight": WEIGHTS,
    "weight_packed": WEIGHTS,
    "weight_scale": SCALES,
    "weight_scale_inv": SCALES,
    "weight_scale_2": SCALES,
}


@dataclass(frozen=True, slots=True)
class Measures:
    """Bytes of all tensors.

    Attributes:
        layers: Layer to role to bytes, in order; None for what belongs to no layer, last.
        roles: Role to bytes, largest first.
    """

    layers: Mapping[int | None, Mapping[str, int]]
    roles: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.roles.values())


def measure_source(checkpoint: Checkpoint) -> Measures:
    """Return the bytes of a checkpoint's tensors."""
    return _measures(
        (layer_of(name), role_of_tensor(name).replace("_", " "), tensor.total_bytes)
        for name, tensor in checkpoint.tensors.items()
    )


def measure_prepared(manifest: Manifest) -> Measures:
    """Return the bytes of a prepared folder's tensors, on all ranks; padding counts apart."""

    def parts() -> Iterable[tuple[int | None, str, int]]:
        for record in manifest.tensors:
            layer, padding = layer_of(record.name), padding_of(record)
            yield layer, _role(record), (bytes_of(record.dtype, record.shape) or 0) - padding
            if padding:
                yield layer, PADDING, padding

    return _measures(parts())


def layer_of(name: str) -> int | None:
    """Return the layer that a tensor is named after: the first number in its path."""
    digits = (field for field in name.split(".") if field.isascii() and field.isdigit())
    found = next(digits, None)
    return None if found is None else int(found)


def _role(record: TensorRecord) -> str:
    if record.rank is None:
        return COMMON
    return _PARTS.get(record.name.rpartition(".")[2].partition("_")[2], OTHERS)


def _measures(parts: Iterable[tuple[int | None, str, int]]) -> Measures:
    layers: dict[int | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    roles: dict[str, int] = defaultdict(int)
    for layer, role, size in parts:
        layers[layer][role] += size
        roles[role] += size
    order = sorted(layers, key=lambda layer: (layer is None, layer or 0))
    return Measures(
        layers={layer: dict(layers[layer]) for layer in order},
        roles=dict(sorted(roles.items(), key=lambda item: (-item[1], item[0]))),
    )
