"""`aiter-prep convert`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aiter_prep.cli import convert_flags as flags
from aiter_prep.cli import plan_words, words
from aiter_prep.cli.convert_flags import Request
from aiter_prep.cli.flags import Json, MaxShardSize, Quiet, Verbose, output_of
from aiter_prep.cli.values import check_device, check_parallel, parse_ranks, parse_size

if TYPE_CHECKING:
    from aiter_prep.cli.output import Output
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan import Plan

SCHEMA = "aiter-prep/convert/1"


def convert(
    context: typer.Context,
    source: flags.Source,
    out: flags.Out = None,
    *,
    tp: flags.Tp = None,
    ep: flags.Ep = None,
    gfx: flags.Gfx = None,
    target: flags.Target = "aiter",
    revision: flags.Revision = None,
    max_shard_size: MaxShardSize = "5GB",
    backend: flags.Backend = "cpu",
    device: flags.Device = "cpu",
    workers: flags.Workers = None,
    ranks: flags.Ranks = None,
    dry_run: flags.DryRun = False,
    resume: flags.Resume = False,
    overwrite: flags.Overwrite = False,
    as_common: flags.AsCommon = None,
    trust_tensors: flags.TrustTensors = False,
    placement: flags.Placement = "linear",
    gate_up: flags.GateUp = None,
    activation_dtype: flags.ActivationDtype = None,
    moe_backend: flags.MoeBackend = None,
    fuse_shared_experts: flags.FuseSharedExperts = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Prepare a checkpoint for the kernels.

    Writes a folder whose expert weights already lie as the kernels want them, cut for a number of
    tensor-parallel ranks. The source is only read.
    """
    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    check_device(device, backend)
    check_parallel(tp, ep, source)
    options = {"gate_up": gate_up, "activation_dtype": activation_dtype, "moe_backend": moe_backend}
    request = Request(
        source=source,
        out=out,
        tp=tp or 1,
        ep=ep or 1,
        placement=placement,
        options={name: value for name, value in options.items() if value is not None},
        fuse_shared_experts=fuse_shared_experts,
        gfx=gfx,
        target=target,
        revision=revision,
        max_shard_bytes=parse_size(max_shard_size),
        backend=backend,
        workers=workers,
        ranks=parse_ranks(ranks),
        resume=resume,
        overwrite=overwrite,
        as_common=tuple(as_common or ()),
        trust_tensors=trust_tensors,
    )
    if dry_run:
        _dry_run(output, request)
    else:
        _convert(output, request)


def _dry_run(output: Output, request: Request) -> None:
    plan, out = _planned(output, request)
    plan_words.show(output, plan, out, resume=request.resume, overwrite=request.overwrite)
    output.next_command("write it with", *(word for word in output.argv if word != "--dry-run"))


def _convert(output: Output, request: Request) -> None:
    from aiter_prep.execute import execute

    plan, out = _planned(output, request)
    for warning in plan.warnings:
        output.warning(warning)
    start = time.perf_counter()
    with output.progress(f"converting for {plan.gfx}, {plan_words.sharing(plan)}") as progress:
        manifest = execute(
            plan,
            out,
            backend=request.backend,
            workers=request.workers,
            resume=request.resume,
            overwrite=request.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    output.lines(*_lines(plan, out, seconds))
    if output.verbose:
        output.lines(*plan_words.shard_lines(plan))
    output.document(SCHEMA, _body(plan, out, manifest, seconds))
    output.next_command("prove it with", "verify", str(out))


def _planned(output: Output, request: Request) -> tuple[Plan, Path]:
    """Open the source and plan; what can be refused without reading anything comes first."""
    from aiter_prep.backends.table import backend_named
    from aiter_prep.inspection.room import check_room
    from aiter_prep.plan import make_plan
    from aiter_prep.storage.hub import open_source
    from aiter_prep.targets.table import target_named

    backend_named(request.backend)
    target = target_named(request.target)
    gfx = request.gfx or _default_chip(output, target.chips)
    target.check_chip(gfx)
    if request.out is not None:
        check_room(request.out, resume=request.resume, overwrite=request.overwrite)
    checkpoint = open_source(request.source, request.revision, quiet=output.quiet)
    plan = make_plan(
        checkpoint,
        tp=request.tp,
        ep=request.ep,
        placement=request.placement,
        options=request.options,
        fuse_shared_experts=request.fuse_shared_experts,
        target=request.target,
        gfx=gfx,
        ranks=request.ranks,
        max_shard_bytes=request.max_shard_bytes,
        as_common=request.as_common,
        trust_tensors=request.trust_tensors,
    )
    return plan, request.out or _default_out(plan)


def _default_chip(output: Output, chips: tuple[str, ...]) -> str:
    """Return the chip of this machine if the target knows it, else the target's first."""
    from aiter_prep.environment import local_chips

    local = [chip for chip in dict.fromkeys(local_chips()) if chip in chips]
    if not local:
        return chips[0]
    output.note(f"converting for {local[0]}, the chip of this machine; --gfx chooses another")
    return local[0]


def _default_out(plan: Plan) -> Path:
    name = plan.checkpoint.name.rstrip("/").rpartition("/")[2]
    parallel = plan.parallel
    sharing = f"tp{parallel.tp}" if parallel.ep == 1 else f"ep{parallel.ep}"
    return Path(f"{name}-{plan.target.name}-{sharing}-{plan.gfx}")


def _lines(plan: Plan, out: Path, seconds: float) -> list[str]:
    ranks = words.count(plan.parallel.ranks, "rank")
    if not plan.is_complete:
        ranks = f"ranks {plan_words.ranks(plan.ranks)} of {plan.parallel.ranks}"
    facts = (
        ("folder", str(out)),
        ("experts", words.count(len(plan.blocks), "module")),
        ("shards", f"{len(plan.shards):,}"),
        ("size", f"{words.size(plan.total_bytes)}"),
        ("source", words.size(plan.checkpoint.total_bytes)),
        ("time", words.duration(seconds)),
    )
    title = f"prepared {plan.checkpoint.name} for {plan.target.name} on {plan.gfx}, {ranks}"
    return [title, *words.columns(facts)]


def _body(plan: Plan, out: Path, manifest: Manifest, seconds: float) -> dict[str, Any]:
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
        "shards": [
            {"file": s.file, "rank": s.rank, "size": s.size, "digest": s.digest}
            for s in manifest.shards
        ],
        "skipped": [dict(entry) for entry in manifest.skipped],
        "warnings": list(plan.warnings),
        "seconds": round(seconds, 3),
    }
