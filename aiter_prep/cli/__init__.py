"""The command line: flags and words."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # not of `typing`: see `aiter_prep`
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name; those of this process by default.

    Returns:
        The exit code; every `--help` lists them.
    """
    try:
        return _main(sys.argv[1:] if argv is None else list(argv), owns_process=argv is None)
    except KeyboardInterrupt:  # before the program has its own handler, while modules are loaded
        if sys.stderr is not None:
            sys.stderr.write("error: stopped\n")
        return 130


def _main(arguments: list[str], *, owns_process: bool) -> int:
    if arguments == ["--version"]:  # in a tenth of a second, so without Typer
        from aiter_prep._version import __version__
        from aiter_prep.cli.output import PROGRAM, Output
        from aiter_prep.errors import AiterPrepError

        output = Output(arguments)
        try:
            output.lines(f"{PROGRAM} {__version__}")
        except AiterPrepError as fault:
            output.failure(fault.message, fault.hint, fault.exit_code)
            return fault.exit_code
        return output.close(0)
    from aiter_prep.cli.app import run

    return run(arguments, owns_process=owns_process)
