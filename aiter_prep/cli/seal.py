"""`aiter-prep seal`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from aiter_prep.cli import words
from aiter_prep.cli.flags import Json, Quiet, Verbose, local, named, output_of
from aiter_prep.cli.plan_words import shard_bodies

SCHEMA = "aiter-prep/seal/1"


def seal(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", parser=local("OUT"), help="The folder that `convert --part` wrote."
        ),
    ],
    *,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="SOURCE",
            parser=named("--source"),
            help="The source, where it lies elsewhere than the parts found it.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Complete a folder that was written in parts.

    Checks that every part is there and followed the same plan; reads no tensor.
    """
    from aiter_prep.execution import seal as complete
    from aiter_prep.storage.hub import open_source

    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    start = time.perf_counter()
    original = None if source is None else open_source(source, quiet=quiet)
    manifest = complete(folder, source=original)
    seconds = time.perf_counter() - start
    total_bytes = sum(shard.size for shard in manifest.shards)
    target = manifest.target
    facts = (
        ("folder", str(folder)),
        ("shards", f"{len(manifest.shards):,}"),
        ("size", words.size(total_bytes)),
        ("time", words.duration(seconds)),
    )
    ranks = words.count(len(target["ranks"]), "rank")
    name = manifest.source["name"]
    output.lines(
        f"sealed {name} for {target['name']} on {target['gfx']}, {ranks}", *words.columns(facts)
    )
    output.document(
        SCHEMA,
        {
            "folder": str(folder),
            "source": {"name": name, "revision": manifest.source["revision"]},
            "target": target["name"],
            "gfx": target["gfx"],
            "tp": target["tp"],
            "ep": target["ep"],
            "ranks": list(target["ranks"]),
            "tensors": len(manifest.tensors),
            "total_bytes": total_bytes,
            "shards": shard_bodies(manifest),
            "seconds": round(seconds, 3),
        },
    )
    output.next_command("prove it with", "verify", folder)
