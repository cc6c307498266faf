"""Every failure that a user can cause, and the exit code that it stands for.

AiterPrepError          1   failed, or a bug of ours
├── InvalidUsage        2   the call itself is wrong
├── DataMismatch        3   the data is not what the manifest says
├── BadSource          10   source missing, truncated or inconsistent
├── NoRule             11   no rule for this family, dtype, layout, target or split
├── OutputNotEmpty     12   the output folder holds something already
└── Interrupted       130   stopped by Ctrl-C or SIGTERM
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AiterPrepError",
    "BadSource",
    "DataMismatch",
    "Interrupted",
    "InvalidUsage",
    "NoRule",
    "OutputNotEmpty",
]


class AiterPrepError(Exception):
    """A failure with a message for the user, a way out, and an exit code.

    Args:
        message: What is wrong, with the value and the limit; lower case, no full stop.
        hint: What to do about it, or empty.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidUsage(AiterPrepError):
    """The arguments of the call contradict each other or have no meaning."""

    exit_code = 2


class DataMismatch(AiterPrepError):
    """A prepared folder does not hold what its manifest says."""

    exit_code = 3


class BadSource(AiterPrepError):
    """The source is missing, truncated or contradicts itself."""

    exit_code = 10


class NoRule(AiterPrepError):
    """The source is sound, but no table has an entry for it."""

    exit_code = 11


class OutputNotEmpty(AiterPrepError):
    """The output folder holds something that this run may not replace."""

    exit_code = 12


class Interrupted(AiterPrepError):
    """The run was stopped from outside; finished shards stay."""

    exit_code = 130
