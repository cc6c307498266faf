"""Calls AITER's own functions, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiter_prep.backends.device import DeviceBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from aiter_prep.backends.aiter_package import Aiter
    from aiter_prep.layouts.permutation import Layout

NAME = "aiter"


@dataclass(frozen=True, slots=True)
class Call:
    """How AITER brings one layout.

    Attributes:
        needs: The functions of AITER that it calls.
        run: From those functions and uint8 `[experts, rows, row_bytes]` to the stored bytes, in
            any shape; what comes after them is not ours.
    """

    needs: tuple[str, ...]
    run: Callable[[Mapping[str, Callable[..., Any]], Any], Any]


def _folded(matrix: Any) -> Any:
    """Return the matrices of all experts as one: the form in which AITER takes scales."""
    return matrix.reshape(-1, matrix.shape[-1])


# Each entry calls what `Layout.aiter_call` names. AITER's `moe_shuffle_weight` and
# `moe_shuffle_scale` look at the chip of this machine, not at the one that the files are for, so
# the functions that they end in are called instead.
CALLS: dict[str, Call] = {
    "tile_16x16": Call(("shuffle_weight",), lambda use, x: use["shuffle_weight"](x, (16, 16))),
    "tile_16x16_interleaved_16": Call(
        ("shuffle_weight_a16w4",), lambda use, x: use["shuffle_weight_a16w4"](x, 16, gate_up=True)
    ),
    "tile_16x16_interleaved_1": Call(
        ("interleave_gate_up_rows", "shuffle_weight"),
        lambda use, x: use["shuffle_weight"](use["interleave_gate_up_rows"](x), (16, 16)),
    ),
    # rows are padded to 256 with uninitialised memory, behind all experts: not ours
    "e8m0": Call(("e8m0_shuffle",), lambda use, x: use["e8m0_shuffle"](_folded(x))),
    "e8m0_interleaved_16": Call(
        ("shuffle_scale_a16w4",),
        lambda use, x: use["shuffle_scale_a16w4"](_folded(x), len(x), gate_up=True),
    ),
    "e8m0_unpadded_rows": Call(
        ("shuffle_scale_a16w4",),
        lambda use, x: use["shuffle_scale_a16w4"](_folded(x), len(x), gate_up=False),
    ),
    "e8m0_32x4": Call(("shuffle_scale_n32k4",), lambda use, x: use["shuffle_scale_n32k4"](x)),
    "e8m0_32x4_interleaved_1": Call(
        ("shuffle_scale_n32k4",),
        lambda use, x: use["shuffle_scale_n32k4"](x, is_guinterleave=True, gate_up=True),
    ),
    "int4_scale": Call(
        ("shuffle_scale_for_int4",),
        lambda use, x: use["shuffle_scale_for_int4"](_groups_first(x)),
    ),
}


def _groups_first(matrix: Any) -> Any:
    """Return `[experts, rows, groups]` of BF16 scales as AITER takes them: groups before rows."""
    import torch

    return matrix.view(torch.bfloat16).transpose(-1, -2).contiguous()


def functions_for(layouts: Iterable[str]) -> tuple[str, ...]:
    """Return the functions that some layouts need."""
    return tuple(
        dict.fromkeys(name for layout in layouts if layout in CALLS for name in CALLS[layout].needs)
    )


class AiterBackend(DeviceBackend):
    """Permutes as AITER does, since AITER does it.

    Args:
        torch: The module.
        device: See `DeviceBackend`.
        device_memory: See `DeviceBackend`.
        found: AITER.
    """

    name = NAME
    lane_buffers = 1
    lane_temporaries = 3  # padded or interleaved, permuted, and made contiguous once more

    def __init__(self, torch: Any, device: Any, device_memory: int, found: Aiter) -> None:
        super().__init__(torch, device, device_memory)
        self._aiter = found
        self.fingerprint: str | None = None

    @property
    def provenance(self) -> Mapping[str, str | None]:
        """Which AITER it was, and the fingerprint of what it brought in the probe."""
        return {
            "aiter_version": self._aiter.version,
            "aiter_commit": self._aiter.commit,
            "aiter_fingerprint": self.fingerprint,
        }

    def permute(self, layout: Layout, matrix: Any, room: Sequence[Any]) -> Any:
        """Return the stored bytes of matrices; see `DeviceBackend.permute`."""
        assert not room
        self._aiter.require(CALLS[layout.name].needs)
        result = CALLS[layout.name].run(self._aiter.functions, matrix)
        # AITER's padding is behind the last expert, where the writer puts our constant
        return result.view(self._torch.uint8).reshape(-1)[: matrix.numel()]
