"""`aiter-prep convert`."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from aiter_prep.cli import convert_flags as flags
from aiter_prep.cli import needed, plan_words, ray, several
from aiter_prep.cli.convert_flags import Request
from aiter_prep.cli.effects import refuse_without_effect
from aiter_prep.cli.flags import (
    Json,
    LogFile,
    MaxShardSize,
    Private,
    ProgressForm,
    Quiet,
    Verbose,
    Workers,
    output_of,
)
from aiter_prep.cli.part import chosen_backend, read_part, write_part
from aiter_prep.cli.push import check_push, push_converted
from aiter_prep.cli.values import each_once, given, parse_ranks, parse_size, read_sharing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiter_prep.cli.output import Output
    from aiter_prep.cli.values import Sharing
    from aiter_prep.execution import Part
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
    workers: Workers = None,
    ranks: flags.Ranks = None,
    dry_run: flags.DryRun = False,
    part: flags.Part = None,
    if_needed: flags.IfNeeded = False,
    engine: flags.Engine = "local",
    ray_address: flags.RayAddress = "auto",
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
    progress: ProgressForm = "auto",
    log_file: LogFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Prepare a checkpoint for the kernels; the source is only read."""
    from aiter_prep.storage.hub import local_folder

    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    sizes: list[int | None] = [*each_once(tp or ())] or [None]
    request = Request(
        source=source,
        out=out,
        sharings=tuple(read_sharing(size, ep, placement, source) for size in sizes),
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
        part=part,
        if_needed=if_needed,
        engine=engine,
        ray_address=ray_address,
        resume=resume,
        overwrite=overwrite,
        as_common=tuple(as_common or ()),
        trust_tensors=trust_tensors,
        stream=stream,
        stream_disk=None if stream_disk is None else parse_size(stream_disk, "--stream-disk"),
        push=push,
        private=private,
    )
    refuse_without_effect(context, request)
    if len(request.sharings) > 1:
        several.refuse_what_is_not_for_several(request)
    place = _place(request)
    output.follow(progress, log_file, apart_from=[local_folder(source), place.out])
    if place.is_of_this_machine:
        output.note(f"converting for {place.gfx}, the chip of this machine; --gfx chooses another")
    output.go_on = lambda: _go_on(output.argv, request, place)
    if dry_run:
        _dry_run(output, request, place)
    elif len(request.sharings) > 1:
        _convert_several(output, request, place)
    else:
        _convert(output, request, place)


def _go_on(argv: tuple[str, ...], request: Request, place: _Place) -> tuple[str, ...] | None:
    """Return the arguments that go on with a conversion, if any shard of it is finished."""
    from aiter_prep.storage.output import has_finished_shards
    from aiter_prep.storage.parts import shards_waiting
    from aiter_prep.storage.swap import work_folder

    if request.part is not None or request.engine != "local":
        with suppress(OSError):  # not even a place where there could be any
            if any(s for p in (place.out, work_folder(place.out)) for s in shards_waiting(p)):
                return argv
        return None
    if not any(map(has_finished_shards, place.folders)):
        return None
    if request.resume:
        return argv
    return (argv[0], "--resume", *argv[1:]) if "--" in argv else (*argv, "--resume")


def _dry_run(output: Output, request: Request, place: _Place) -> None:
    with TemporaryDirectory(prefix="aiter-prep-") as scratch:
        plans = _plans(output, request, place, Path(scratch))
    if plan_words.show(output, plans, resume=request.resume, overwrite=request.overwrite):
        output.next_command("write it with", *(word for word in output.argv if word != "--dry-run"))


def _convert(output: Output, request: Request, place: _Place) -> None:
    is_on_ray = ray.is_asked_for(request)
    part = read_part(output, request)
    if not request.if_needed:
        _check_room(place.out, request)
    if request.push is not None:
        check_push(output, request.push, private=request.private)
    with _scratch(place.out, is_shared=part is not None) as scratch:
        (plan,) = _plans(output, request, place, scratch).values()
        _carry_out(output, request, plan, place, part, is_on_ray=is_on_ray)


@contextmanager
def _scratch(out: Path, *, is_shared: bool) -> Iterator[Path]:
    """Have a place for what is fetched of a source elsewhere.

    What one run has fetched stays beside the folder until it is done, for `--resume`. Processes
    that share a conversion read headers and small files for themselves alone.
    """
    from aiter_prep.storage.remote import scratch_folder

    if not is_shared:
        yield scratch_folder(out)
        return
    with TemporaryDirectory(prefix="aiter-prep-") as folder:
        yield Path(folder)


def _carry_out(
    output: Output,
    request: Request,
    plan: Plan,
    place: _Place,
    part: Part | None,
    *,
    is_on_ray: bool,
) -> None:
    if request.if_needed:
        manifest = needed.held(output, plan, place.out, overwrite=request.overwrite)
        if manifest is not None:
            _say_held(output, request, plan, place.out, manifest)
            return
        _check_room(place.out, request)
    for warning in plan.warnings:
        output.warning(warning)
    if part is not None:
        write_part(output, request, plan, place.out, part)
    elif is_on_ray:
        _convert_on_ray(output, request, plan, place)
    else:
        _convert_here(output, request, plan, place)


def _check_room(out: Path, request: Request) -> None:
    """Refuse a folder that may not be written, before anything else takes its time."""
    from aiter_prep.inspection.room import check_room

    if request.part is None and request.engine == "local":
        check_room(out, resume=request.resume, overwrite=request.overwrite)
    else:
        from aiter_prep.storage.parts import check_room_for_parts, place_for_parts

        check_room_for_parts(place_for_parts(out, overwrite=request.overwrite))


def _convert_here(output: Output, request: Request, plan: Plan, place: _Place) -> None:
    from aiter_prep.execution import execute

    backend = chosen_backend(output, request, plan)
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
    _say_done(output, request, plan, place.out, manifest, time.perf_counter() - start)


def _convert_on_ray(output: Output, request: Request, plan: Plan, place: _Place) -> None:
    start = time.perf_counter()
    label = f"converting on Ray for {plan.gfx}, {plan_words.sharing(plan)}"
    with output.progress(label) as progress:
        manifest = ray.convert(request, plan, place.out, progress)
    _say_done(output, request, plan, place.out, manifest, time.perf_counter() - start)


def _say_done(
    output: Output, request: Request, plan: Plan, out: Path, manifest: Manifest, seconds: float
) -> None:
    output.lines(*plan_words.done_lines(plan, out, seconds))
    if output.verbose:
        output.lines(*plan_words.shard_lines(plan))
    body = plan_words.done_body(plan, out, manifest, seconds)
    pushed = push_converted(output, out, request.push, private=request.private)
    output.document(SCHEMA, {**body, "pushed": pushed})
    output.next_command("prove it with", "verify", out)


def _say_held(output: Output, request: Request, plan: Plan, out: Path, manifest: Manifest) -> None:
    if plan.checkpoint.remote is not None:
        plan.checkpoint.remote.clear()
    body = plan_words.done_body(plan, out, manifest, 0.0, was_needed=False)
    pushed = push_converted(output, out, request.push, private=request.private)
    output.document(SCHEMA, {**body, "pushed": pushed})


def _convert_several(output: Output, request: Request, place: _Place) -> None:
    from aiter_prep.storage.remote import scratch_folder

    if not request.if_needed:
        for out in place.folders:
            several.check_room(out, request)
    several.check_pushes(output, request)
    plans = _plans(output, request, place, scratch_folder(place.out))
    held: dict[Path, Manifest] = {}
    for out, plan in plans.items():
        if request.if_needed:
            manifest = needed.held(output, plan, out, overwrite=request.overwrite)
            if manifest is None:
                several.check_room(out, request)
            else:
                held[out] = manifest
    left = {out: plan for out, plan in plans.items() if out not in held}
    for warning in dict.fromkeys(w for plan in left.values() for w in plan.warnings):
        output.warning(warning)
    several.convert(output, request, plans, held)


@dataclass(frozen=True, slots=True)
class _Place:
    """What is known before the source is looked at.

    Attributes:
        gfx: The chip.
        is_of_this_machine: Whether it was chosen because this machine has it.
        out: The folder that was named, or is named after the source.
        folders: The folders to write, and how the ranks of each share the experts: `out` alone, or
            some in it.
    """

    gfx: str
    is_of_this_machine: bool
    out: Path
    folders: Mapping[Path, Sharing]


def _place(request: Request) -> _Place:
    """Decide on the chip and the folder, and refuse what can be refused by now."""
    from aiter_prep.storage.hub import name_of
    from aiter_prep.targets.table import target_named

    target = target_named(request.target)
    local = None if request.gfx else _local_chip(target.chips)
    gfx = request.gfx or local or target.chips[0]
    target.check_chip(gfx)
    is_single = len(request.sharings) == 1
    labels = [s.label for s in request.sharings] if is_single else []
    name = "-".join([name_of(request.source), target.name, *labels, gfx])
    out = request.out or Path(name)
    folders = {out if is_single else out / s.label: s for s in request.sharings}
    return _Place(gfx, local is not None, out, folders)


def _plans(output: Output, request: Request, place: _Place, scratch: Path) -> dict[Path, Plan]:
    """Return the plan for each folder, all of one source that is opened once."""
    checkpoint = _source(output, request, scratch)
    return {o: _planned(checkpoint, request, s, place.gfx) for o, s in place.folders.items()}


def _planned(checkpoint: Checkpoint, request: Request, sharing: Sharing, gfx: str) -> Plan:
    from aiter_prep.plan import make_plan

    return make_plan(
        checkpoint,
        tp=sharing.tp,
        ep=sharing.ep,
        placement=sharing.placement,
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


def _local_chip(chips: tuple[str, ...]) -> str | None:
    """Return the chip of this machine, if it has one and the target knows it."""
    from aiter_prep.backends.rocm import local_chips

    return next((chip for chip in local_chips() if chip in chips), None)
