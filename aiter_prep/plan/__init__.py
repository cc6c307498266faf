"""Decides every output tensor before a byte is read."""

from aiter_prep.plan.cut import Parallel
from aiter_prep.plan.make import Plan, make_plan
from aiter_prep.plan.steps import Piece, Source, Stack, Step

__all__ = ["Parallel", "Piece", "Plan", "Source", "Stack", "Step", "make_plan"]
