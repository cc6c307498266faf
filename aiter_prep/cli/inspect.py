"""`aiter-prep inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiter_prep.cli import words
from aiter_prep.cli.flags import Json, Quiet, Verbose, local, output_of
from aiter_prep.cli.pictures import check_pictures, write_pictures
from aiter_prep.cli.plan_words import group_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiter_prep.cli.output import Output
    from aiter_prep.inspection import (
        Outlook,
        PreparedInspection,
        SourceInspection,
        UnfinishedInspection,
    )

SCHEMA = "aiter-prep/inspect/1"
GPUS_OF_A_HOST = 8


def inspect(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", parser=local("PATH"), help="A checkpoint, or a prepared folder."
        ),
    ],
    *,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|png",
            parser=local("--plot"),
            help="Also draw where the bytes are: a picture.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            parser=local("--html"),
            help="Also write a page about a prepared folder; it needs nothing beside it.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what a folder holds.

    For a checkpoint also what a conversion would write; for a prepared folder what was done. No
    tensor is read.
    """
    from aiter_prep import inspection

    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    check_pictures(path, plot, html)
    found = inspection.inspect_path(path)
    write_pictures(output, found, path, plot, html)
    output.document(SCHEMA, found.to_json())
    if isinstance(found, inspection.SourceInspection):
        output.lines(*_source_lines(found))
        _source_hint(output, path, found)
    elif isinstance(found, inspection.PreparedInspection):
        output.lines(*_prepared_lines(found))
        if found.missing:
            output.hint("copy the folder again, or convert again")
        else:
            output.next_command("check it with", "verify", path)
    else:
        output.lines(*_unfinished_lines(found))
        from aiter_prep.storage.guards import finish_hint

        output.hint(finish_hint(path))


def _source_lines(found: SourceInspection) -> Iterator[str]:
    yield f"{found.name}: {found.architecture} ({found.model_type})"
    yield (
        f"  {words.count(found.tensors, 'tensor')}, {words.count(found.shards, 'shard')}, "
        f"{words.size(found.total_bytes)}"
    )
    if found.groups:
        yield "experts"
    for group in found.groups:
        yield f"  {group_line(group)}, {words.size(group.total_bytes)}"
    yield "bytes by role"
    rows = [
        (role.replace("_", " "), words.size(total), words.percent(total, found.total_bytes))
        for role, total in found.roles.items()
    ]
    yield from words.columns(rows, right=[1, 2])
    yield from _outlook_lines(found.outlooks)
    for problem in found.problems:
        yield f"problem: {problem}"
    for warning in found.warnings:
        yield f"warning: {warning}"


def _outlook_lines(outlooks: tuple[Outlook, ...]) -> Iterator[str]:
    """Yield what each target would write; chips that would write the same share the lines."""
    from aiter_prep.inspection.model import compact

    alike: dict[tuple[object, ...], list[Outlook]] = {}
    for outlook in outlooks:
        says = (outlook.workable_tp, outlook.forecasts, outlook.refusal, outlook.is_one_way)
        key = (outlook.target, *says)
        alike.setdefault(key, []).append(outlook)
    for members in alike.values():
        first = members[0]
        chips = ", ".join(outlook.gfx for outlook in members)
        if first.refusal:
            yield f"{first.target} on {chips}: {first.refusal}"
            continue
        one_way = "; one way: keep the source" if first.is_one_way else ""
        yield f"{first.target} on {chips}: --tp {compact(first.workable_tp)}{one_way}"
        rows = [("--tp", "one rank", "all shards", "padding")]
        rows += [
            (
                str(forecast.tp),
                words.size(forecast.rank_bytes),
                words.size(forecast.total_bytes),
                words.percent(forecast.padding_bytes, forecast.total_bytes),
            )
            for forecast in first.forecasts
        ]
        yield from words.columns(rows, right=[0, 1, 2, 3])


def _source_hint(output: Output, path: Path, found: SourceInspection) -> None:
    if found.problems:
        output.hint("`convert` would refuse this checkpoint, and say what can be done, if anything")
    elif outlook := next((o for o in found.outlooks if o.workable_tp), None):
        sizes = [forecast.tp for forecast in outlook.forecasts] or outlook.workable_tp
        tp = max((n for n in sizes if n <= GPUS_OF_A_HOST), default=sizes[0])
        output.next_command("convert it with", "convert", path, "--tp", str(tp))


def _prepared_lines(found: PreparedInspection) -> Iterator[str]:
    target = found.target
    ranks = [entry for entry in found.ranks if entry.rank is not None]
    yield f"{found.folder}: prepared from {found.source['name']}"
    revision = found.source["revision"]
    facts = [
        ("model", f"{found.architecture} ({found.model_type})"),
        ("revision", revision) if revision else (),
        ("target", f"{target['name']} on {target['gfx']}, {_sharing(target)}"),
        ("written by", " ".join(str(found.created_by.get(key)) for key in ("name", "version"))),
        ("size", words.size(found.total_bytes)),
        ("padding", f"{words.size(found.padding_bytes)}"),
        ("layouts", ", ".join(f"{name} ({n} tensors)" for name, n in found.layouts.items())),
    ]
    yield from words.columns([row for row in facts if row])
    count = target["tp"] * target["ep"]
    if len(ranks) != count:
        yield f"  holds {len(ranks)} of {count} ranks"
    yield "experts"
    for group in found.groups:
        layers = f", layers {group.layers}" if group.layers else ""
        yield f"  {group.experts}{layers}: {_facts(group.facts)}"
    yield "shards"
    rows = [
        (
            "common" if entry.rank is None else f"rank {entry.rank}",
            words.count(entry.shards, "shard"),
            words.count(entry.tensors, "tensor"),
            words.size(entry.total_bytes),
        )
        for entry in found.ranks
    ]
    yield from words.columns(rows, right=[1, 2, 3])
    for name, meaning in found.conversions.items():
        yield f"changed values: {name}: {meaning}"
    if found.is_lossy:
        count = words.count(found.lossy_tensors, "tensor")
        yield f"{count} cannot be undone: `restore` refuses this folder, so keep the source"
    for entry in found.skipped:
        yield f"left out: {entry.get('name')}: {entry.get('reason')}"
    for file in found.missing:
        yield f"problem: `{file}` is missing"


def _sharing(target: Mapping[str, Any]) -> str:
    if target["ep"] == 1:
        return f"tp {target['tp']}"
    return f"ep {target['ep']}, {target['placement']}"


def _facts(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts.get('num_experts')} experts, {facts.get('scheme')}, "
        f"hidden {facts.get('hidden')} (padded {facts.get('padded_hidden')}), "
        f"intermediate {facts.get('intermediate')} "
        f"(padded {facts.get('padded_intermediate_per_rank')} per rank), "
        f"rows {facts.get('row_order')}"
    )


def _unfinished_lines(found: UnfinishedInspection) -> Iterator[str]:
    yield f"{found.folder}: a conversion has begun this folder and not finished it"
    yield f"  {words.count(found.shards, 'shard')} finished, {words.size(found.total_bytes)}"
