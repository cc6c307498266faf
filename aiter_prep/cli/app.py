"""The commands, and what happens around each of them."""

from __future__ import annotations

import gc
import importlib
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from aiter_prep._version import __version__
from aiter_prep.cli import faults
from aiter_prep.cli.flags import exit_codes
from aiter_prep.cli.output import PROGRAM, Output
from aiter_prep.cli.stopping import stopping

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Each in the module of its name, in the order of their use.
COMMANDS = {
    "convert": exit_codes(10, 11, 12),
    "seal": exit_codes(3, 10, 11, 12, code_3="parts are missing, or of another plan"),
    "verify": exit_codes(3, 10, 11, code_0="nothing is wrong"),
    "inspect": exit_codes(3, 10, 11),
    "restore": exit_codes(3, 11, 12),
    "push": exit_codes(3, 12),
    "layouts": exit_codes(),
    "env": exit_codes(),
    "demo": exit_codes(12),
}


def run(argv: Sequence[str], *, owns_process: bool) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name.
        owns_process: Whether the process ends with this call.

    Returns:
        The exit code.
    """
    output = Output(argv)

    def last_words() -> None:
        _say(output, faults.interrupted(output.go_on()))
        output.close(faults.INTERRUPTED)

    with stopping(last_words, owns_process=owns_process), _rare_collections():
        code = _run(output)
        return output.close(code)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for garbage less often.

    The headers of a large checkpoint are some hundred thousand objects that all live to the end;
    to look through them again and again takes a fifth of the time of `inspect`.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run(output: Output) -> int:
    try:
        command = typer.main.get_command(build(output.argv))
        code = command.main(
            args=list(output.argv), prog_name=PROGRAM, standalone_mode=False, obj=output
        )
    except (Exception, KeyboardInterrupt) as fault:  # noqa: BLE001 - the error table knows all
        failure = faults.failure_of(fault, output.go_on)
        if failure.is_bug and output.verbose:
            output.trace("".join(traceback.format_exception(fault)))
        return _say(output, failure)
    if code == faults.INTERRUPTED:  # Typer has caught it
        return _say(output, faults.interrupted(output.go_on()))
    return code if isinstance(code, int) else 0


def _say(output: Output, failure: faults.Failure) -> int:
    output.failure(failure.message, failure.hint, failure.exit_code)
    return failure.exit_code


class _InOrder(typer.core.TyperGroup):
    """Lists the commands in the order of their use."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return their names."""
        return sorted(super().list_commands(ctx), key=[*COMMANDS].index)


def build(argv: Sequence[str]) -> typer.Typer:
    """Return the application with the command that is called, or with all where none is named.

    The flags of all commands take longer to build than most commands take to start.

    Args:
        argv: The arguments without the program's name.
    """
    app = typer.Typer(
        cls=_InOrder,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(epilog=exit_codes(3, 10, 11, 12))(_root)
    for name in [word for word in argv[:1] if word in COMMANDS] or COMMANDS:
        module = importlib.import_module(f"aiter_prep.cli.{name}")
        if hasattr(module, "commands"):
            app.add_typer(module.commands(), name=name)
        else:
            app.command(epilog=COMMANDS[name])(getattr(module, name))
    return app


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Prepare mixture-of-experts checkpoints ahead of time for AMD's AITER kernels."""
