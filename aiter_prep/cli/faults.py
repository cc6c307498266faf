"""The error table: what a user is told, and the exit code, for everything that can be raised."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from aiter_prep.cli.output import PROGRAM
from aiter_prep.errors import AiterPrepError
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.shell import command_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAILED, USAGE, INTERRUPTED = 1, 2, 130

# The root of the errors that Typer's own Click raises for a wrong call; it has no public name.
UsageFault: type[Exception] = typer.BadParameter.__mro__[2]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no result.

    Attributes:
        message: What is wrong.
        hint: What to do about it, or empty.
        exit_code: The exit code.
        is_bug: Whether it is a mistake of ours.
    """

    message: str
    hint: str
    exit_code: int
    is_bug: bool = False


def failure_of(
    fault: BaseException, go_on: Callable[[], Sequence[str] | None] = lambda: None
) -> Failure:
    """Return what to tell a user about an exception.

    Args:
        fault: The exception.
        go_on: Returns the arguments of the command that goes on, where something is there to go
            on with.
    """
    if isinstance(fault, AiterPrepError):
        return Failure(fault.message, fault.hint, fault.exit_code)
    if isinstance(fault, UsageFault):
        return _wrong_call(fault)
    if isinstance(fault, (KeyboardInterrupt, typer.Abort)):
        return interrupted(go_on())
    if isinstance(fault, MemoryError):
        return Failure("out of memory", "use fewer --workers", FAILED)
    if isinstance(fault, OSError):
        return _of_system(fault)
    return Failure(
        f"this is a bug: {type(fault).__name__}: {printable(str(fault))}",
        f"report it with what `{PROGRAM} env` prints; -v shows where it happened",
        FAILED,
        is_bug=True,
    )


def _of_system(fault: OSError) -> Failure:
    if not (fault.filename or _has_current_folder()):
        return Failure("the current folder is gone", "go to one that is there", FAILED)
    where = f": `{printable(str(fault.filename))}`" if fault.filename else ""
    return Failure(f"{fault.strerror or fault}{where}", "", FAILED)


def _has_current_folder() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - nothing of the path is wanted
    except OSError:
        return False
    return True


def interrupted(go_on: Sequence[str] | None) -> Failure:
    """Return what to tell a user who stopped a command.

    Args:
        go_on: The arguments of the command that goes on, where something is there to go on with.
    """
    hint = ""
    if go_on is not None:
        hint = f"finished shards stay; go on with: {command_line(PROGRAM, *go_on)}"
    return Failure("stopped", hint, INTERRUPTED)


def _wrong_call(fault: Any) -> Failure:
    message = str(fault.format_message()).rstrip(".").replace("'", "`")
    context = getattr(fault, "ctx", None)
    command = context.command_path if context else PROGRAM
    return Failure(
        message[:1].lower() + message[1:], f"`{command} --help` lists what it takes", USAGE
    )
