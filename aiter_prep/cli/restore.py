"""`aiter-prep restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aiter_prep.cli import words
from aiter_prep.cli.flags import (
    PUSH,
    Folder,
    Json,
    LogFile,
    MaxShardSize,
    ProgressForm,
    Quiet,
    Verbose,
    Workers,
    local,
    output_of,
)
from aiter_prep.cli.values import parse_size

SCHEMA = "aiter-prep/restore/1"


def restore(
    context: typer.Context,
    folder: Folder,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            parser=local("OUT", PUSH),
            help="The folder to write; empty or not there.",
        ),
    ],
    *,
    max_shard_size: MaxShardSize = "5GB",
    workers: Workers = None,
    progress: ProgressForm = "auto",
    log_file: LogFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Undo a conversion.

    Writes the Hugging Face checkpoint again that a folder was prepared from: every tensor with its
    name, dtype, shape and bytes.
    """
    from aiter_prep.restoration import restore as undo

    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    output.follow(progress, log_file, apart_from=[folder, out])
    limit = parse_size(max_shard_size)
    with output.progress("restoring") as update:
        done = undo(folder, out, max_shard_bytes=limit, workers=workers, progress=update)
    output.lines(
        f"restored {folder} to {done.folder}",
        f"  {words.count(done.tensors, 'tensor')}, {words.count(done.shards, 'shard')}, "
        f"{words.size(done.total_bytes)}",
        *(f"  {note}" for note in done.notes),
    )
    output.document(
        SCHEMA,
        {
            "folder": str(done.folder),
            "tensors": done.tensors,
            "shards": done.shards,
            "total_bytes": done.total_bytes,
            "notes": list(done.notes),
        },
    )
    output.next_command("look at it with", "inspect", out)
