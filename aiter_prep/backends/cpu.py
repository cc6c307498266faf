"""Moves bytes with numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.storage.scratch import Scratch, plain_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiter_prep.backends.table import PlacedPart
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.storage.buffers import ByteArray

NAME = "cpu"


class CpuBackend:
    """Lays out experts in main memory, one strided copy per part."""

    name = NAME
    device = "cpu"
    chunk_bytes = 8 * 1024 * 1024

    def __init__(self) -> None:
        self._scratch = Scratch()

    @property
    def provenance(self) -> Mapping[str, str | None]:
        """No AITER had a hand in it."""
        return {"aiter_version": None}

    def buffer(self, size: int) -> ByteArray:
        """Return plain memory."""
        return plain_memory(size)

    def lay_out(self, layout: Layout, parts: Sequence[PlacedPart], stored: ByteArray) -> None:
        """Place parts of many experts' matrices.

        Args:
            layout: Order of the bytes.
            parts: uint8 `[experts, rows, columns]` each, and the row and byte at which it begins.
            stored: C-contiguous uint8 `[experts, rows, row_bytes]`, filled with padding already.
        """
        if layout.keeps_atoms:
            for part, row, column in parts:
                layout.place(stored, part, row, column)
            return
        staged = self._scratch.take("staged", stored.shape)
        staged[...] = stored
        for part, row, column in parts:
            _, rows, columns = part.shape
            staged[:, row : row + rows, column : column + columns] = part
        layout.apply_into(staged, stored, self._scratch.take("work", stored.shape))
