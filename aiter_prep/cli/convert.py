"""`aiter-prep convert`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from aiter_prep.cli import convert_flags as flags
from aiter_prep.cli import plan_words, words
from aiter_prep.cli.convert_flags import Request
from aiter_prep.cli.flags import Json, MaxShardSize, Private, Quiet, Verbose, output_of
from aiter_prep.cli.push import push_body, push_lines, run_push
from aiter_prep.cli.values import given, parse_ranks, parse_size, read_sharing

if TYPE_CHECKING:
    from aiter_prep.cli.output import Output
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan import Plan
    from aiter_prep.storage.checkpoint import Checkpoint

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
    backend: flags.Backend = "auto",
    device: flags.Device = None,
    device_memory: flags.DeviceMemory = "2GB",
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
    stream: flags.Stream = False,
    stream_disk: flags.StreamDisk = None,
    push: flags.Push = None,
    private: Private = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Prepare a checkpoint for the kernels; the source is only read."""
    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    request = Request(
        source=source,
        out=out,
        sharing=read_sharing(tp, ep, placement, source),
        options=given(gate_up=gate_up, activation_dtype=activation_dtype, moe_backend=moe_backend),
        fuse_shared_experts=fuse_shared_experts,
        gfx=gfx,
        target=target,
        revision=revision,
        max_shard_bytes=parse_size(max_shard_size),
        backend=backend,
        device=device,
        device_memory=parse_size(device_memory),
        workers=workers,
        ranks=parse_ranks(ranks),
        resume=resume,
        overwrite=overwrite,
        as_common=tuple(as_common or ()),
        trust_tensors=trust_tensors,
        stream=stream,
        stream_disk=None if stream_disk is None else parse_size(stream_disk, "--stream-disk"),
        push=push,
        private=private,
    )
    (_dry_run if dry_run else _convert)(output, request)


def _dry_run(output: Output, request: Request) -> None:
    place = _place(output, request)
    with TemporaryDirectory(prefix="aiter-prep-") as scratch:
        plan = _plan(output, request, place.gfx, Path(scratch))
    plan_words.show(output, plan, place.out, resume=request.resume, overwrite=request.overwrite)
    output.next_command("write it with", *(word for word in output.argv if word != "--dry-run"))


def _convert(output: Output, request: Request) -> None:
    from aiter_prep.backends.table import choose_backend
    from aiter_prep.execution import execute, layouts_of
    from aiter_prep.inspection.room import check_room
    from aiter_prep.storage.remote import scratch_folder

    place = _place(output, request)
    check_room(place.out, resume=request.resume, overwrite=request.overwrite)
    if request.push is not None:
        _check_push(output, request.push, request)
    plan = _plan(output, request, place.gfx, scratch_folder(place.out))
    for warning in plan.warnings:
        output.warning(warning)
    backend, reason = choose_backend(
        request.backend,
        request.device,
        layouts=layouts_of(plan),
        device_memory=request.device_memory,
    )
    if backend.name != "cpu" or output.verbose:
        output.note(f"backend {backend.name} on {backend.device}: {reason}")
    start = time.perf_counter()
    with output.progress(f"converting for {plan.gfx}, {plan_words.sharing(plan)}") as progress:
        manifest = execute(
            plan,
            place.out,
            backend=backend,
            workers=request.workers,
            resume=request.resume,
            overwrite=request.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    output.lines(*_lines(plan, place.out, seconds))
    if output.verbose:
        output.lines(*plan_words.shard_lines(plan))
    pushed = None if request.push is None else _push(output, request.push, request, place.out)
    output.document(SCHEMA, {**_body(plan, place.out, manifest, seconds), "pushed": pushed})
    output.next_command("prove it with", "verify", str(place.out))


def _check_push(output: Output, repo_id: str, request: Request) -> None:
    """Find out whether a push would be taken, before the conversion takes its time."""
    from aiter_prep.publication import check_place, open_place
    from aiter_prep.storage.object_store import ObjectFolder, is_store_url

    check_place(repo_id)
    if is_store_url(repo_id):
        ObjectFolder(repo_id).list()
    else:
        open_place(repo_id, private=request.private, quiet=output.quiet)


def _push(output: Output, repo_id: str, request: Request, out: Path) -> dict[str, Any]:
    done = run_push(output, out, repo_id, private=request.private)
    output.lines(*push_lines(done, out))
    return push_body(done)


@dataclass(frozen=True, slots=True)
class _Place:
    """What is known before the source is looked at: for which chip, and into which folder."""

    gfx: str
    out: Path


def _place(output: Output, request: Request) -> _Place:
    """Decide on the chip and the folder, and refuse what can be refused by now."""
    from aiter_prep.storage.hub import name_of
    from aiter_prep.targets.table import target_named

    target = target_named(request.target)
    gfx = request.gfx or _default_chip(output, target.chips)
    target.check_chip(gfx)
    name = f"{name_of(request.source)}-{target.name}-{request.sharing.label}-{gfx}"
    return _Place(gfx, request.out or Path(name))


def _plan(output: Output, request: Request, gfx: str, scratch: Path) -> Plan:
    from aiter_prep.plan import make_plan

    return make_plan(
        _source(output, request, scratch),
        tp=request.sharing.tp,
        ep=request.sharing.ep,
        placement=request.sharing.placement,
        options=request.options,
        fuse_shared_experts=request.fuse_shared_experts,
        target=request.target,
        gfx=gfx,
        ranks=request.ranks,
        max_shard_bytes=request.max_shard_bytes,
        as_common=request.as_common,
        trust_tensors=request.trust_tensors,
    )


def _source(output: Output, request: Request, scratch: Path) -> Checkpoint:
    """Open the source: whole, or by its headers where the shards are to come one by one."""
    from aiter_prep.storage.hub import open_source
    from aiter_prep.storage.object_store import is_store_url
    from aiter_prep.storage.sources import open_streamed

    if not request.stream and not is_store_url(request.source):
        return open_source(request.source, request.revision, quiet=output.quiet)
    return open_streamed(request.source, request.revision, scratch, request.stream_disk)


def _default_chip(output: Output, chips: tuple[str, ...]) -> str:
    """Return the chip of this machine if the target knows it, else the target's first."""
    from aiter_prep.backends.rocm import local_chips

    local = [chip for chip in dict.fromkeys(local_chips()) if chip in chips]
    if not local:
        return chips[0]
    output.note(f"converting for {local[0]}, the chip of this machine; --gfx chooses another")
    return local[0]


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
