"""Undoes a prepared folder: from its manifest alone back to the source's matrices."""

from aiter_prep.undo.matrices import BadPadding, Undoer, Undone
from aiter_prep.undo.records import (
    DamagedTensor,
    SourceTensor,
    StackRecord,
    accounted,
    common_records,
    require_all_ranks,
    require_lossless,
    source_tensors,
    stacks_of,
)

__all__ = [
    "BadPadding",
    "DamagedTensor",
    "SourceTensor",
    "StackRecord",
    "Undoer",
    "Undone",
    "accounted",
    "common_records",
    "require_all_ranks",
    "require_lossless",
    "source_tensors",
    "stacks_of",
]
