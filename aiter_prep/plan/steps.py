"""Output tensors, and which part of which source tensor each is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiter_prep.storage.dtypes import width_of

if TYPE_CHECKING:
    from aiter_prep.layouts.conversions import Conversion
    from aiter_prep.layouts.merges import Merge
    from aiter_prep.layouts.packing import Packing
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.targets.model import Form


@dataclass(frozen=True, slots=True)
class Source:
    """The source tensors of one projection in one role.

    Attributes:
        pattern: Their names, with `{expert}` for the id.
        tensors: One per expert, or one for all when fused.
        fused: One tensor holds all experts.
        shared: Name of the last tensor, where it is a shared expert's.
        transposed: An expert's matrix lies `[columns, rows]` in the file.
        dtype: safetensors dtype.
        rows: Rows of one expert's matrix, rows being what the projection puts out.
        row_bytes: Bytes of a row.
        conversion: Change of values on reading, or None.
    """

    pattern: str
    tensors: tuple[TensorInfo, ...]
    fused: bool
    shared: str | None
    transposed: bool
    dtype: str
    rows: int
    row_bytes: int
    conversion: Conversion | None

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return width_of(self.dtype)

    def place_of(self, expert: int) -> tuple[TensorInfo, int]:
        """Return the tensor that holds an expert's matrix, and where the matrix starts in it."""
        if self.fused:
            return self.tensors[0], expert * self.rows * self.row_bytes
        return self.tensors[expert], 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of an expert's source matrix, and where it goes.

    Attributes:
        source: Which of the stack's sources.
        rows: Rows of the source matrix.
        columns: Bytes of each of these rows.
        to_row: Row of the stored matrix, before it is laid out, at which the piece begins.
    """

    source: int
    rows: range
    columns: range
    to_row: int


@dataclass(frozen=True, slots=True)
class Stack:
    """The experts' tensors of one name, on all ranks.

    Attributes:
        name: Name of the output tensor, the same on every rank.
        group: `w13` or `w2`.
        role: `weight`, `weight_scale`, `weight_scale_2`, `bias`, `input_scale`.
        sources: What it is made of.
        scales: One per-tensor scale for each source, where a merge needs them.
        form: How it is stored.
        layout: Order of the bytes.
        dtype: Stored safetensors dtype.
        runtime_dtype: torch dtype that an engine views it as.
        merge: A value computed from more than one source tensor, or None.
        packing: Change of width after the layout, or None.
        rows: Rows of one expert's matrix, padding included, before it is packed.
        row_bytes: Bytes of its rows, padding included.
        filled_row_bytes: The same without the padding that the layout adds.
        filled_columns: The same in elements.
        steps: Its output tensors, one per rank.
    """

    name: str
    group: str
    role: str
    sources: tuple[Source, ...]
    scales: tuple[Source, ...]
    form: Form
    layout: Layout
    dtype: str
    runtime_dtype: str
    merge: Merge | None
    packing: Packing | None
    rows: int
    row_bytes: int
    filled_row_bytes: int
    filled_columns: int
    steps: tuple[Step, ...] = ()

    @property
    def is_scalar(self) -> bool:
        """Whether one value stands for all experts of a rank: the largest."""
        return self.form.shape == "scalar"

    @property
    def is_lossy(self) -> bool:
        """Whether the source cannot be had back from it."""
        return self.merge is not None or self.is_scalar

    @property
    def expert_bytes(self) -> int:
        """Stored bytes of one expert."""
        return self.rows * self.row_bytes // (self.packing.ratio if self.packing else 1)


@dataclass(frozen=True, slots=True)
class Step:
    """One output tensor of one rank.

    Attributes:
        rank: The rank.
        experts: Global ids of its experts, in the order in which they are stored.
        pieces: What each expert's matrix is made of; the rest of the matrix is padding.
        shape: Stored shape.
        logical_shape: Experts, rows and columns without padding; without columns for vectors.
    """

    rank: int
    experts: range
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    logical_shape: tuple[int, ...]
