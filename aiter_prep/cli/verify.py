"""`aiter-prep verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiter_prep.cli import words
from aiter_prep.cli.flags import (
    Folder,
    Json,
    LogFile,
    ProgressForm,
    Quiet,
    Verbose,
    Workers,
    local,
    named,
    output_of,
)
from aiter_prep.errors import DataMismatch, InvalidUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiter_prep.storage.checkpoint import Checkpoint
    from aiter_prep.verification import Problem, Report

SCHEMA = "aiter-prep/verify/1"


def verify(
    context: typer.Context,
    folder: Folder,
    *,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="SOURCE",
            parser=named("--source"),
            help="Also undo the layouts and compare with this folder or Hub id, byte by byte.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check headers and sizes only; read no tensor.")
    ] = False,
    sha256sums: Annotated[
        Path | None,
        typer.Option(
            "--sha256sums",
            metavar="FILE",
            parser=local("--sha256sums"),
            help="Also write the SHA-256 of every file, as `sha256sum --check` takes it.",
        ),
    ] = None,
    workers: Workers = None,
    progress: ProgressForm = "auto",
    log_file: LogFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Prove that a prepared folder is sound.

    Reads every byte and compares it with the manifest: digests, headers, sizes, names.
    """
    from aiter_prep.storage.hub import local_folder
    from aiter_prep.storage.side_files import check_side_file
    from aiter_prep.verification import verify as check

    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    if quick and source is not None:
        raise InvalidUsage("--quick reads no tensor, so it cannot compare with a --source")
    read = [folder, None if source is None else local_folder(source)]
    if sha256sums is not None:
        if quick:
            raise InvalidUsage("--quick reads no tensor, so it has no --sha256sums")
        check_side_file(sha256sums, filter(None, read))
    output.follow(progress, log_file, apart_from=read, others=[sha256sums])
    original = None if source is None else _opened(source, folder, quiet=quiet)
    with output.progress("verifying") as update:
        report = check(
            folder,
            source=original,
            quick=quick,
            sha256=sha256sums is not None,
            workers=workers,
            progress=update,
        )
    if sha256sums is not None and report.is_clean:
        report.write_sha256sums(sha256sums)
    depth = "quick" if quick else "full" if source is None else "source"
    output.lines(*_lines(report, depth))
    output.document(SCHEMA, _body(report, depth))
    if not report.is_clean:
        output.hint("the folder is not what it says: convert again, or copy it again")
        raise typer.Exit(DataMismatch.exit_code)
    if sha256sums is not None:
        output.note(f"the sums of {words.count(len(report.sha256), 'file')} are in {sha256sums}")
    if depth == "full":
        name = str(folder)
        output.next_command("compare with its source", "verify", name, "--source", "SOURCE")


def _opened(source: str, folder: Path, *, quiet: bool) -> Checkpoint:
    """Open the source; a Hub id at the commit that the folder was made from."""
    from aiter_prep.manifest import read_manifest
    from aiter_prep.storage.hub import is_hub_id, open_source

    revision = None
    if is_hub_id(source):
        revision = read_manifest(folder).source.get("revision")
    return open_source(source, revision, quiet=quiet)


DEPTHS = {
    "quick": "headers and sizes are as the manifest says; no tensor was read",
    "full": "every byte is as the manifest says",
    "source": "every byte is as the manifest says, and the source comes back from it",
}


def _lines(report: Report, depth: str) -> Iterator[str]:
    for problem in report.problems:
        yield _problem_line(problem)
    read = (
        f"{words.count(report.shards, 'shard')}, {words.count(report.tensors, 'tensor')}, "
        f"{words.size(report.total_bytes)} read"
    )
    if report.is_clean:
        yield f"{report.folder}: {_meaning(report, depth)}"
        yield f"  {read}"
    else:
        yield f"{report.folder}: {words.count(len(report.problems), 'problem')} ({read})"
    for note in report.notes:
        yield f"  {note}"


def _meaning(report: Report, depth: str) -> str:
    if depth != "source" or not report.lossy_tensors:
        return DEPTHS[depth]
    count = words.count(report.lossy_tensors, "tensor")
    return (
        f"{DEPTHS['full']} and as the source gives it; {count} of {report.tensors:,} cannot be "
        "undone, so keep the source"
    )


def _problem_line(problem: Problem) -> str:
    tensor = f" `{problem.tensor}`" if problem.tensor is not None else ""
    rank = f" of rank {problem.rank}" if problem.rank is not None else ""
    return f"{problem.file}:{tensor}{rank} {problem.what}"


def _body(report: Report, depth: str) -> dict[str, Any]:
    return {
        "folder": str(report.folder),
        "depth": depth,
        "is_clean": report.is_clean,
        "problems": [
            {"file": p.file, "tensor": p.tensor, "rank": p.rank, "what": p.what}
            for p in report.problems
        ],
        "shards": report.shards,
        "tensors": report.tensors,
        "total_bytes": report.total_bytes,
        "lossy_tensors": report.lossy_tensors,
        "notes": list(report.notes),
    }
