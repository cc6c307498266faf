"""`aiter-prep push`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiter_prep.cli import words
from aiter_prep.cli.effects import makes_repository, without_effect
from aiter_prep.cli.flags import Folder, Json, Private, Quiet, Verbose, output_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiter_prep.cli.output import Output
    from aiter_prep.publication import Pushed

SCHEMA = "aiter-prep/push/1"


def push(
    context: typer.Context,
    folder: Folder,
    repo_id: Annotated[
        str,
        typer.Argument(
            metavar="REPO", help="A repository of the Hub, org/name, or s3://BUCKET/FOLDER."
        ),
    ],
    *,
    private: Private = False,
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            "--branch",
            metavar="BRANCH",
            help="The branch to write; by default one of its own, named TARGET-tpN-GFX.",
        ),
    ] = None,
    card: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="The model card: write (ours, or refuse another's), leave, or replace.",
        ),
    ] = "write",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what else that branch holds.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Push a prepared folder to the Hub or to an object store.

    Every byte is verified first. What is there already is not sent again, so the same command goes
    on with what was cut off.
    """
    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    if private and not makes_repository(repo_id):
        raise without_effect("--private", "a repository of the Hub")
    done = run_push(
        output,
        folder,
        repo_id,
        private=private,
        branch=revision,
        card=card,
        overwrite=overwrite,
    )
    output.lines(*push_lines(done, folder))
    output.document(SCHEMA, {"folder": str(folder), **push_body(done)})


def run_push(output: Output, folder: Path, repo_id: str, **options: Any) -> Pushed:
    """Verify a folder and push it, with progress."""
    from aiter_prep.publication import check_folder, check_place, push

    check_place(repo_id, options.get("branch"), options.get("card", "write"))
    with output.progress("verifying") as progress:
        files = check_folder(folder, progress)
    return push(folder, repo_id, quiet=output.quiet, files=files, **options)


def check_push(output: Output, repo_id: str, *, private: bool) -> None:
    """Find out whether a push would be taken, before a conversion takes its time."""
    from aiter_prep.publication import check_place, open_place
    from aiter_prep.storage.object_store import ObjectFolder, is_store_url

    check_place(repo_id)
    if is_store_url(repo_id):
        ObjectFolder(repo_id).list()
    else:
        open_place(repo_id, private=private, quiet=output.quiet)


def place_beside(repo_id: str, label: str) -> str:
    """Return where one of several folders is pushed: a store has folders, the Hub branches."""
    from aiter_prep.storage.object_store import is_store_url

    return f"{repo_id.rstrip('/')}/{label}" if is_store_url(repo_id) else repo_id


def push_converted(
    output: Output, folder: Path, repo_id: str | None, *, private: bool
) -> dict[str, Any] | None:
    """Push a folder that was converted just now, where it is wanted; return that as JSON has it."""
    if repo_id is None:
        return None
    done = run_push(output, folder, repo_id, private=private)
    output.lines(*push_lines(done, folder))
    return push_body(done)


def push_lines(done: Pushed, folder: Path) -> Iterator[str]:
    """Yield what a push did, for people."""
    yield f"pushed {folder} to {done.repo_id}"
    sent = words.count(done.uploaded_files, "file")
    facts = [
        ("branch", done.branch or ""),
        ("commit", done.commit or ""),
        ("holds", f"{words.count(done.files, 'file')}, {words.size(done.total_bytes)}"),
        ("sent", f"{sent}, {words.size(done.uploaded_bytes)}"),
        ("card", done.card or ""),
    ]
    yield from words.columns([row for row in facts if row[1]])


def push_body(done: Pushed) -> dict[str, Any]:
    """Return what a push did, as JSON has it."""
    return {
        "repo": done.repo_id,
        "branch": done.branch,
        "commit": done.commit,
        "files": done.files,
        "total_bytes": done.total_bytes,
        "uploaded_files": done.uploaded_files,
        "uploaded_bytes": done.uploaded_bytes,
        "card": done.card,
    }
