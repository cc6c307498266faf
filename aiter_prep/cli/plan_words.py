"""A plan in words: what `convert --dry-run` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiter_prep.cli import words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from aiter_prep.cli.output import Output
    from aiter_prep.inspection import ExpertGroup, Forecast
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan import Plan

SCHEMA = "aiter-prep/plan/1"
SEVERAL_SCHEMA = "aiter-prep/plans/1"

ROLE_WORDS = {
    "weight": "expert weights",
    "weight_scale": "expert scales",
    "bias": "expert biases",
    "common": "common tensors",
}


def show(output: Output, plans: Mapping[Path, Plan], *, resume: bool, overwrite: bool) -> bool:
    """Print the plans for some folders, and what could keep them from being carried out.

    Returns:
        Whether nothing could.
    """
    from aiter_prep.inspection import forecast_of_plan, needed_bytes, obstacles

    bodies: list[dict[str, Any]] = []
    beside_bytes = 0
    is_free = True
    for out, plan in plans.items():
        forecast = forecast_of_plan(plan)
        found = obstacles(plan, out, resume=resume, overwrite=overwrite, beside_bytes=beside_bytes)
        beside_bytes += needed_bytes(plan, out, resume=resume)
        output.lines(*_lines(plan, out, forecast, found))
        bodies.append(_body(plan, out, forecast, found))
        is_free = is_free and not found
    if len(bodies) == 1:
        output.document(SCHEMA, bodies[0])
    else:
        output.document(SEVERAL_SCHEMA, {"plans": bodies})
    return is_free


def ranks(numbers: tuple[int, ...]) -> str:
    """Return ranks as text: `0-3, 7`."""
    from aiter_prep.inspection.model import compact

    return compact(numbers)


def shard_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for every shard."""
    yield "shards"
    shards = [(shard.file, words.size(shard.layout.total_bytes)) for shard in plan.shards]
    yield from words.columns(shards, right=[1])


def sharing(plan: Plan) -> str:
    """Return how the ranks share the experts: `tp 8`, or `ep 8, linear`."""
    parallel = plan.parallel
    return f"tp {parallel.tp}" if parallel.ep == 1 else f"ep {parallel.ep}, {parallel.placement}"


def group_line(group: ExpertGroup) -> str:
    """Return one line about experts modules of a kind."""
    layers = f", layers {group.layers}" if group.layers else ""
    return (
        f"{group.experts}{layers}: {words.count(group.num_experts, 'expert')}, {group.scheme}, "
        f"hidden {group.hidden}, intermediate {group.intermediate}"
    )


def _lines(plan: Plan, out: Path, forecast: Forecast, obstacles: tuple[str, ...]) -> Iterator[str]:
    yield f"plan for {plan.checkpoint.name} ({plan.checkpoint.architecture})"
    facts = [
        ("folder", f"{out} (nothing is written now)"),
        ("target", f"{plan.target.name} on {plan.gfx}"),
        ("ranks", f"{ranks(plan.ranks)} of {plan.parallel.ranks}, {sharing(plan)}"),
        *((name.replace("_", " "), value) for name, value in plan.options.items()),
    ]
    yield from words.columns(facts)
    yield "experts"
    yield from _expert_lines(plan)
    yield from shard_lines(plan)
    yield "bytes"
    yield from words.columns(list(_byte_rows(forecast)), right=[1, 2, 3, 4])
    if plan.small_files:
        yield f"copied as they are: {', '.join(('config.json (wrapped)', *plan.small_files))}"
    for name, reason in plan.skipped:
        yield f"skipped: {name}: {reason}"
    for warning in plan.warnings:
        yield f"warning: {warning}"
    for obstacle in obstacles:
        yield f"would fail: {obstacle}"
    if not obstacles:
        yield "nothing is in the way"


def _expert_lines(plan: Plan) -> Iterator[str]:
    from aiter_prep.inspection.model import expert_groups

    for group in expert_groups(block.block for block in plan.blocks):
        yield f"  {group_line(group)}"
    seen: set[str] = set()
    for block in plan.blocks:
        cut = block.cut
        per_rank = f"{len(cut.parts[0])} of {block.block.intermediate}"
        line = f"    a rank holds {per_rank} intermediate columns, padded to {cut.intermediate}"
        if plan.parallel.ep > 1:
            line += f", of {len(cut.experts[0])} of {block.block.num_experts} experts"
        if cut.hidden != block.block.hidden:
            line += f"; hidden {block.block.hidden}, padded to {cut.hidden}"
        if line not in seen:
            seen.add(line)
            yield line


def _byte_rows(forecast: Forecast) -> Iterator[tuple[str, ...]]:
    yield ("", "source", "written", "padding", "")
    for role in forecast.roles:
        yield (
            ROLE_WORDS.get(role.role, f"expert {role.role.replace('_', ' ')}"),
            words.size(role.source_bytes),
            words.size(role.stored_bytes),
            words.size(role.padding_bytes),
            words.percent(role.padding_bytes, role.stored_bytes),
        )
    yield ("one rank", "", words.size(forecast.rank_bytes))
    yield (
        "all shards",
        words.size(sum(role.source_bytes for role in forecast.roles)),
        words.size(forecast.total_bytes),
        words.size(forecast.padding_bytes),
        words.percent(forecast.padding_bytes, forecast.total_bytes),
    )


def _body(plan: Plan, out: Path, forecast: Forecast, obstacles: tuple[str, ...]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "folder": str(out),
        "source": {
            "name": plan.checkpoint.name,
            "revision": plan.checkpoint.revision,
            "architecture": plan.checkpoint.architecture,
            "total_bytes": plan.checkpoint.total_bytes,
        },
        "target": plan.target.name,
        "gfx": plan.gfx,
        "ep": plan.parallel.ep,
        "placement": plan.parallel.placement,
        "options": dict(plan.options),
        "fuse_shared_experts": plan.fuse_shared_experts,
        "ranks": list(plan.ranks),
        **asdict(forecast),
        "experts": [
            {
                "experts": block.block.experts,
                "scheme": block.block.scheme.name,
                "family": block.block.family.name,
                "row_order": block.path.row_order,
                "num_experts": block.block.num_experts,
                "num_experts_per_rank": [len(experts) for experts in block.cut.experts],
                "hidden": block.block.hidden,
                "padded_hidden": block.cut.hidden,
                "intermediate": block.block.intermediate,
                "intermediate_per_rank": [len(part) for part in block.cut.parts],
                "padded_intermediate_per_rank": block.cut.intermediate,
            }
            for block in plan.blocks
        ],
        "shards": [
            {
                "file": shard.file,
                "rank": shard.rank,
                "size": shard.layout.total_bytes,
                "tensors": len(shard.layout.slots),
            }
            for shard in plan.shards
        ],
        "files": ["config.json", *plan.small_files],
        "skipped": [{"name": name, "reason": reason} for name, reason in plan.skipped],
        "warnings": list(plan.warnings),
        "obstacles": list(obstacles),
    }


def done_lines(plan: Plan, out: Path, seconds: float) -> list[str]:
    """Return what is said of a folder that was prepared."""
    held = words.count(plan.parallel.ranks, "rank")
    if not plan.is_complete:
        held = f"ranks {ranks(plan.ranks)} of {plan.parallel.ranks}"
    facts = (
        ("folder", str(out)),
        ("experts", words.count(len(plan.blocks), "module")),
        ("shards", f"{len(plan.shards):,}"),
        ("size", f"{words.size(plan.total_bytes)}"),
        ("source", words.size(plan.checkpoint.total_bytes)),
        ("time", words.duration(seconds)),
    )
    title = f"prepared {plan.checkpoint.name} for {plan.target.name} on {plan.gfx}, {held}"
    return [title, *words.columns(facts)]


def done_body(
    plan: Plan, out: Path, manifest: Manifest, seconds: float, *, was_needed: bool = True
) -> dict[str, Any]:
    """Return the same for a program."""
    return {
        "folder": str(out),
        "source": {"name": plan.checkpoint.name, "revision": plan.checkpoint.revision},
        "target": plan.target.name,
        "gfx": plan.gfx,
        "tp": plan.parallel.tp,
        "ep": plan.parallel.ep,
        "options": dict(plan.options),
        "ranks": list(plan.ranks),
        "is_complete": plan.is_complete,
        "tensors": len(manifest.tensors),
        "total_bytes": plan.total_bytes,
        "shards": shard_bodies(manifest),
        "skipped": [dict(entry) for entry in manifest.skipped],
        "warnings": list(plan.warnings),
        "was_needed": was_needed,
        "seconds": round(seconds, 3),
    }


def shard_bodies(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the shards of a folder for a program."""
    return [
        {"file": s.file, "rank": s.rank, "size": s.size, "digest": s.digest}
        for s in manifest.shards
    ]
