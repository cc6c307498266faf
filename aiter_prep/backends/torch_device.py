"""Our own layouts as views of torch, on any device."""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, Any

from aiter_prep.backends.device import DeviceBackend
from aiter_prep.layouts.permutation import REST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiter_prep.layouts.permutation import Layout

NAME = "torch"
ATOM_BYTES = 16
# A copy of wide elements reaches the bandwidth of the memory; one of single bytes a fifth of it.
_ELEMENTS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


class TorchBackend(DeviceBackend):
    """Permutes with strided copies, in elements as wide as the layout allows."""

    name = NAME
    lane_buffers = 2
    lane_temporaries = 0

    def permute(self, layout: Layout, matrix: Any, room: Sequence[Any]) -> Any:
        """Return the stored bytes of matrices; see `DeviceBackend.permute`."""
        radices = layout.radices(*matrix.shape[-2:])
        digits = tuple(range(len(radices)))
        if layout.order[-1] == digits[-1]:
            self._copy(matrix, radices, layout.order, room[0])
            return room[0]
        # no two bytes stay together: gather whole tiles first, then permute the bytes of each
        outer = layout.order[: (*layout.rows, *layout.columns).count(REST)]
        inner = tuple(digit for digit in digits if digit not in outer)
        self._copy(matrix, radices, (*outer, *inner), room[0])
        within = [radices[digit] for digit in inner]
        order = tuple(inner.index(digit) for digit in layout.order[len(outer) :])
        tiles = room[0].view(-1, prod(within))
        self._copy(tiles, within, order, matrix.view(-1))
        return matrix

    def _copy(
        self, source: Any, radices: Sequence[int], order: tuple[int, ...], target: Any
    ) -> None:
        """Copy bytes, the digits of whose place are put into another order.

        Args:
            source: C-contiguous bytes, many times as many as the digits count.
            radices: Of the place of a byte, most significant first.
            order: Digit `order[j]` of `radices` is the j-th digit of the new place.
            target: C-contiguous, as many bytes.
        """
        count = len(order)
        kept = next(d for d in range(count + 1) if order[d:] == tuple(range(d, count)))
        run = prod(radices[kept:])  # bytes that stay together
        atom = gcd(run, ATOM_BYTES)
        element = getattr(self._torch, _ELEMENTS[atom])
        before = source.view(-1).view(element).view(-1, *radices[:kept], run // atom)
        after = target.view(-1).view(element)
        after = after.view(-1, *(radices[digit] for digit in order[:kept]), run // atom)
        after.copy_(before.permute(0, *(1 + digit for digit in order[:kept]), 1 + kept))
