"""Flags that several commands share, and what their help says about exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from aiter_prep.cli.output import Output

FETCH = "fetch it first, with the tools of what holds it"
PUSH = "write to a local folder, and bring it there with `aiter-prep push` or `convert --push`"


def local(what: str, way_out: str = FETCH) -> Callable[[str], Path]:
    """Return what reads an argument that names a local folder or file.

    Args:
        what: What the help calls it.
        way_out: What to do with an address such as `s3://bucket/folder`.
    """

    def path(text: str) -> Path:
        from aiter_prep.storage.files import local_path

        return local_path(text, what, way_out)

    return path


def named(what: str) -> Callable[[str], str]:
    """Return what reads an argument that must name something, of whatever kind.

    Args:
        what: What the help calls it.
    """

    def name(text: str) -> str:
        if not text:
            local(what)(text)
        return text

    return name


Json: TypeAlias = Annotated[
    bool,
    typer.Option("--json", envvar="AITER_PREP_JSON", help="Print the result as one JSON object."),
]
Quiet: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", envvar="AITER_PREP_QUIET", help="No progress and no hints on stderr."
    ),
]
Verbose: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        envvar="AITER_PREP_VERBOSE",
        help="More detail, and the tracebacks of bugs.",
    ),
]
ProgressForm: TypeAlias = Annotated[
    str,
    typer.Option(
        "--progress",
        envvar="AITER_PREP_PROGRESS",
        metavar="FORM",
        help="How progress is shown on stderr: bar, lines, json (an object a line), none, or auto: "
        "a bar on a terminal, else lines.",
    ),
]
LogFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--log-file",
        envvar="AITER_PREP_LOG_FILE",
        metavar="FILE",
        parser=local("--log-file"),
        help="Append all that is said, progress included, to a file, with the time.",
    ),
]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(
        envvar="AITER_PREP_WORKERS",
        metavar="N",
        help="Threads; one per usable core by default, 16 at most. The bytes stay the same.",
    ),
]
MaxShardSize: TypeAlias = Annotated[
    str,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        envvar="AITER_PREP_MAX_SHARD_SIZE",
        help="Limit for a shard's data: bytes, or a number with KB, MB, GB, KiB, MiB, GiB.",
    ),
]
Folder: TypeAlias = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", parser=local("FOLDER"), help="A prepared folder."),
]
Private: TypeAlias = Annotated[
    bool, typer.Option("--private", help="A repository that is made for a push is private.")
]

EXIT_CODES = {
    0: "done",
    1: "failed, or a bug",
    2: "the call is wrong",
    3: "the data is not what the manifest says",
    10: "the source is missing, truncated or inconsistent",
    11: "no rule for this family, dtype, layout, target or split",
    12: "the output folder is not empty",
    130: "stopped by Ctrl-C or SIGTERM",
}


def exit_codes(*codes: int, **words: str) -> str:
    """Return the end of a command's help: the exit codes that it has, besides 0, 1, 2 and 130.

    Args:
        codes: The others.
        words: Other words for one of them, as `code_0="done"`.
    """
    lines = [
        f"  {code:>3}  {words.get(f'code_{code}', EXIT_CODES[code])}"
        for code in sorted({0, 1, 2, 130, *codes})
    ]
    # \b: Click keeps these lines as they are
    return "\n".join(["\b", "Exit codes (take an unknown one for a failure):", *lines])


def output_of(context: typer.Context, *, as_json: bool, quiet: bool, verbose: bool) -> Output:
    """Return the output of this run, with a command's flags."""
    output = context.obj
    assert isinstance(output, Output)
    return output.configure(as_json=as_json, quiet=quiet, verbose=verbose)
