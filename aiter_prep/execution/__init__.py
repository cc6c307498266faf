"""Carries out a plan; the only writer."""

from aiter_prep.execution.bundles import Part
from aiter_prep.execution.run import execute, layouts_of
from aiter_prep.execution.sealing import seal
from aiter_prep.execution.sharing import execute_part

__all__ = [
    "Part",
    "execute",
    "execute_part",
    "layouts_of",
    "seal",
]
