"""Moves bytes with numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.storage.buffers import ByteArray

NAME = "cpu"


class CpuBackend:
    """Lays out experts in main memory, one strided copy per piece."""

    name = NAME
    device = "cpu"
    aiter_version: str | None = None

    def lay_out(
        self,
        layout: Layout,
        pieces: Sequence[tuple[ByteArray, int]],
        stored: ByteArray,
    ) -> None:
        """Place pieces of many experts' matrices.

        Args:
            layout: Order of the bytes.
            pieces: uint8 `[experts, rows, columns]` each, and the row at which it begins.
            stored: C-contiguous uint8 `[experts, rows, row_bytes]`, filled with padding already.
        """
        if layout.keeps_atoms:
            for piece, row in pieces:
                layout.place(stored, piece, row)
            return
        staged = stored.copy()
        for piece, row in pieces:
            staged[:, row : row + piece.shape[1], : piece.shape[2]] = piece
        layout.apply_into(staged, stored)
