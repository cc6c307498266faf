"""Proves that a prepared folder holds what its manifest says, or what its source held."""

from aiter_prep.verification.report import Problem, Report
from aiter_prep.verification.run import verify

__all__ = ["Problem", "Report", "verify"]
