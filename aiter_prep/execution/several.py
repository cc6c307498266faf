"""Carries out several plans of one source at once, so that the source is read once."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.backends.table import Backend, choose_backend
from aiter_prep.errors import AiterPrepError, InvalidUsage, OutputNotEmpty
from aiter_prep.execution.fingerprint import facts_of_run, fingerprint_of
from aiter_prep.execution.needed import differences
from aiter_prep.execution.record import created_by, manifest_of
from aiter_prep.execution.run import (
    Run,
    layouts_of,
    missing_bytes,
    promised,
    refuse_overlap,
    run_jobs,
    write_files,
)
from aiter_prep.execution.sealing import is_sealed
from aiter_prep.execution.shardset import ShardSet
from aiter_prep.execution.source import check_source_unchanged
from aiter_prep.manifest import read_manifest
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import OutputFolder, way_on
from aiter_prep.storage.threads import checked_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiter_prep.execution.sink import Sink
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan.make import BlockPlan, Plan
    from aiter_prep.plan.steps import Stack
    from aiter_prep.progress import Progress
    from aiter_prep.storage.buffers import Bytes
    from aiter_prep.storage.output import Written


def execute_several(
    plans: Mapping[Path, Plan],
    *,
    backend: Backend | str = "auto",
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> dict[Path, Manifest]:
    """Write several prepared folders of one source, and read the source once.

    Each folder is the one that `execute` would write, byte for byte.

    Args:
        plans: The folders to write, and what goes into each; all plans of one open checkpoint.
        backend: What moves the bytes: a name, or what `choose_backend` returned.
        workers: Threads; one per usable core by default.
        resume: Go on with unfinished folders; those that are finished are left alone.
        overwrite: Replace prepared or unfinished folders.
        progress: Called now and then.

    Raises:
        As `execute`; InvalidUsage also where the plans are not of one checkpoint.
    """
    threads = checked_workers(workers)
    _check_together(tuple(plans.values()))
    if isinstance(backend, str):
        layouts = {layout for plan in plans.values() for layout in layouts_of(plan)}
        backend, _ = choose_backend(backend, layouts=tuple(sorted(layouts)))
    for out, plan in plans.items():
        refuse_overlap(plan.checkpoint.folder, out)
    held = {
        out: read_manifest(out)
        for out, plan in plans.items()
        if resume and _is_held(plan, out, overwrite=overwrite)
    }
    left = {out: plan for out, plan in plans.items() if out not in held}
    options = {"resume": resume, "overwrite": overwrite}
    try:
        written = _execute(left, backend, threads, progress, **options) if left else {}
    except OSError as fault:
        names = ", ".join(f"`{printable(str(out))}`" for out in left)
        raise AiterPrepError(
            f"cannot write {names}: {fault.strerror}",
            way_on(*left),
        ) from fault
    return {out: held.get(out) or written[out] for out in plans}


def _check_together(plans: Sequence[Plan]) -> None:
    first = plans[0]
    if any(plan.checkpoint is not first.checkpoint for plan in plans):
        raise InvalidUsage("plans that are carried out at once need one checkpoint, opened once")
    if any(plan.common != first.common for plan in plans):
        raise InvalidUsage("plans that are carried out at once need the same common tensors")


def _is_held(plan: Plan, out: Path, *, overwrite: bool) -> bool:
    """Return whether a folder is finished.

    Raises:
        OutputNotEmpty: It is, but is another conversion, and is not to be replaced.
    """
    if not is_sealed(out):
        return False
    different = differences(plan, out)
    if different and overwrite:
        return False
    if different:
        raise OutputNotEmpty(
            f"`{printable(str(out))}` holds another conversion: {', '.join(different[:3])}",
            "replace it with --overwrite, or choose another output folder",
        )
    return True


def _execute(
    plans: Mapping[Path, Plan],
    backend: Backend,
    workers: int,
    progress: Callable[[Progress], None] | None,
    *,
    resume: bool,
    overwrite: bool,
) -> dict[Path, Manifest]:
    (first, *_) = plans.values()
    with ExitStack() as stack:
        outputs: dict[Path, OutputFolder] = {}
        needed: dict[int, int] = {}
        for out, plan in plans.items():
            output = stack.enter_context(
                OutputFolder(
                    out,
                    fingerprint=fingerprint_of(plan),
                    facts=facts_of_run(plan),
                    resume=resume,
                    overwrite=overwrite,
                )
            )
            output.keep_only({shard.file: shard.layout for shard in plan.shards})
            outputs[out] = output
            disk = output.folder.stat().st_dev
            needed[disk] = needed.get(disk, 0) + missing_bytes(plan, output)
            output.require_space(needed[disk])
        sets = [ShardSet(outputs[out], plan.shards) for out, plan in plans.items()]
        try:
            together = SharedSink(sets, [plan.parallel.ranks for plan in plans.values()])
            merged = replace(first, blocks=_merged(tuple(plans.values())))
            run_jobs(merged, Run(together, backend, workers, progress))
            check_source_unchanged(first)
        except BaseException:
            for shards in sets:
                shards.discard()
            raise
        manifests: dict[Path, Manifest] = {}
        for out, plan in plans.items():
            files = list(write_files(plan, outputs[out]))
            manifest = manifest_of(plan, created_by(backend), outputs[out].finished, files)
            outputs[out].seal(manifest.to_json(), promised(manifest))
            manifests[out] = manifest
    if first.checkpoint.remote is not None:
        first.checkpoint.remote.clear()
    return manifests


def _merged(plans: Sequence[Plan]) -> tuple[BlockPlan, ...]:
    """Return the modules of all plans, each with the stacks of all, their ranks counted on."""
    merged: list[BlockPlan] = []
    for blocks in zip(*(plan.blocks for plan in plans), strict=True):
        stacks: list[Stack] = []
        offset = 0
        for plan, block in zip(plans, blocks, strict=True):
            stacks += [_counted_on(stack, offset) for stack in block.stacks]
            offset += plan.parallel.ranks
        merged.append(replace(blocks[0], stacks=tuple(stacks)))
    return tuple(merged)


def _counted_on(stack: Stack, offset: int) -> Stack:
    steps = tuple(replace(step, rank=step.rank + offset) for step in stack.steps)
    return replace(stack, steps=steps)


class SharedSink:
    """Hands the bytes of output tensors to several sinks, whose ranks are counted on.

    Args:
        sinks: The sinks.
        ranks: How many ranks each has. Those of the second begin where those of the first end.
    """

    def __init__(self, sinks: Sequence[Sink], ranks: Sequence[int]) -> None:
        self._sinks = tuple(sinks)
        self._of_rank = [
            (sink, rank) for sink, count in zip(sinks, ranks, strict=True) for rank in range(count)
        ]

    def is_finished(self, rank: int | None, name: str) -> bool:
        """Return whether a tensor needs no writing anywhere."""
        return all(sink.is_finished(own, name) for sink, own in self._takers(rank))

    def total_bytes(self, rank: int | None, name: str) -> int:
        """Return the size of a tensor."""
        sink, own = self._takers(rank)[0]
        return sink.total_bytes(own, name)

    def write(self, rank: int | None, name: str, offset: int, data: Bytes) -> None:
        """Hand on some bytes of a tensor."""
        for sink, own in self._takers(rank):
            if not sink.is_finished(own, name):
                sink.write(own, name, offset, data)

    def complete(self, rank: int | None, name: str, written: Written) -> None:
        """Note that a tensor is written."""
        for sink, own in self._takers(rank):
            if not sink.is_finished(own, name):
                sink.complete(own, name, written)

    def _takers(self, rank: int | None) -> Sequence[tuple[Sink, int | None]]:
        if rank is None:
            return [(sink, None) for sink in self._sinks]
        return [self._of_rank[rank]]
