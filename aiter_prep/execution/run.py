"""Carries out a plan: streams, bounds memory, resumes, seals."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.backends.table import Backend, choose_backend
from aiter_prep.errors import AiterPrepError, InvalidUsage
from aiter_prep.execution.fingerprint import facts_of_run, fingerprint_of
from aiter_prep.execution.jobs import Context, copy_tensors, run_block
from aiter_prep.execution.record import created_by, manifest_of, wrapped_config
from aiter_prep.execution.shardset import ShardSet
from aiter_prep.execution.source import check_source_unchanged, read_small_file
from aiter_prep.execution.supplied import Job, supplied
from aiter_prep.progress import Board
from aiter_prep.storage.checkpoint import CONFIG_FILE
from aiter_prep.storage.files import local_path
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import OutputFolder, way_on
from aiter_prep.storage.reader import FolderReader
from aiter_prep.storage.scratch import Scratch
from aiter_prep.storage.threads import checked_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aiter_prep.execution.sink import Sink
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan.make import Plan
    from aiter_prep.progress import Progress
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.storage.supply import ShardSupply

COPY_JOB_BYTES = 256 * 1024 * 1024
POLL_SECONDS = 0.1


def execute(
    plan: Plan,
    out: str | Path,
    *,
    backend: Backend | str = "auto",
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Write the prepared folder that a plan describes.

    Memory is bounded by a few experts per worker, whatever the model's size and the number of
    ranks. The result is the same, byte for byte, for every number of workers, every backend and
    after a resume.

    Args:
        plan: From `make_plan`.
        out: The folder to write.
        backend: What moves the bytes: a name, or what `choose_backend` returned.
        workers: Threads; one per usable core by default.
        resume: Go on with an unfinished run.
        overwrite: Replace a prepared or unfinished folder.
        progress: Called now and then.

    Raises:
        OutputNotEmpty: `out` holds something that may not be replaced.
        BadSource: The source changed or cannot be read.
        NoRule: A value has no place in the target's dtype.
        AiterPrepError: The disk is full or fails.
        Interrupted: Stopped from outside; finished shards stay.
    """
    threads = checked_workers(workers)
    if isinstance(backend, str):
        backend, _ = choose_backend(backend, layouts=layouts_of(plan))
    out = local_path(out, "the folder to write", "write to a local folder, then `push` it")
    refuse_overlap(plan.checkpoint.folder, out)
    try:
        return _execute(plan, out, backend, threads, progress, resume=resume, overwrite=overwrite)
    except OSError as fault:
        raise AiterPrepError(
            f"cannot write `{printable(str(out))}`: {fault.strerror}",
            way_on(out),
        ) from fault


def layouts_of(plan: Plan) -> tuple[str, ...]:
    """Return the names of all layouts that a plan asks for."""
    return tuple(sorted({s.layout.name for block in plan.blocks for s in block.stacks}))


def _execute(
    plan: Plan,
    out: Path,
    backend: Backend,
    workers: int,
    progress: Callable[[Progress], None] | None,
    *,
    resume: bool,
    overwrite: bool,
) -> Manifest:
    with OutputFolder(
        out,
        fingerprint=fingerprint_of(plan),
        facts=facts_of_run(plan),
        resume=resume,
        overwrite=overwrite,
    ) as output:
        output.keep_only({shard.file: shard.layout for shard in plan.shards})
        output.require_space(missing_bytes(plan, output))
        shards = ShardSet(output, plan.shards)
        try:
            run_jobs(plan, Run(shards, backend, workers, progress))
            check_source_unchanged(plan)
        except BaseException:
            shards.discard()
            raise
        files = list(write_files(plan, output))
        manifest = manifest_of(plan, created_by(backend), output.finished, files)
        output.seal(manifest.to_json(), promised(manifest))
    if plan.checkpoint.remote is not None:
        plan.checkpoint.remote.clear()
    return manifest


@dataclass(frozen=True, slots=True)
class Run:
    """What `run_jobs` runs with.

    Attributes:
        shards: The output.
        backend: What moves the bytes.
        workers: Threads.
        progress: Called now and then.
        fetched: Where shards that lie elsewhere are put meanwhile; by default where the source's
            other files are.
    """

    shards: Sink
    backend: Backend
    workers: int
    progress: Callable[[Progress], None] | None
    fetched: Path | None = None


def run_jobs(plan: Plan, run: Run) -> None:
    """Run every job; the first failure or a Ctrl-C ends the others at their next chunk."""
    remote = plan.checkpoint.remote
    supply = None if remote is None else remote.supply(run.fetched)
    folder = plan.checkpoint.folder if supply is None else supply.folder
    with FolderReader(folder) as reader:
        _run_jobs(plan, run, reader, supply)


def _run_jobs(plan: Plan, run: Run, reader: FolderReader, supply: ShardSupply | None) -> None:
    board = Board()
    stop = threading.Event()
    context = Context(
        reader, run.shards, Scratch(run.backend.buffer), run.backend, stop, board.advance
    )
    jobs = _jobs(plan, context)
    board.expect(sum(job.total_bytes for job in jobs), len(jobs))
    if supply is not None:
        jobs = supplied(jobs, supply, context)
    pool = ThreadPoolExecutor(run.workers, thread_name_prefix="aiter-prep")
    futures = [pool.submit(board.run, job.what, job.run) for job in jobs]
    try:
        pending: set[Future[None]] = set(futures)
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if run.progress is not None:
                run.progress(board.progress())
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _jobs(plan: Plan, context: Context) -> list[Job]:
    """Return what is left to do."""
    jobs: list[Job] = []
    for block in plan.blocks:
        stacks = [
            stack
            for stack in block.stacks
            if not all(context.shards.is_finished(step.rank, stack.name) for step in stack.steps)
        ]
        if stacks:
            tensors = [t for s in stacks for x in (*s.sources, *s.scales) for t in x.tensors]
            files = frozenset(tensor.file for tensor in tensors)
            run = partial(run_block, context, block)
            jobs.append(Job(block.block.experts, run, files, block.block.total_bytes))
    left = [t for t in plan.common if not context.shards.is_finished(None, t.name)]
    is_remote = plan.checkpoint.remote is not None
    if is_remote:  # so that a batch needs one shard, not all of them
        left.sort(key=lambda tensor: (tensor.file, tensor.start))
    for batch in _batches(left, by_file=is_remote):
        total = sum(tensor.total_bytes for tensor in batch)
        files = frozenset(tensor.file for tensor in batch)
        jobs.append(Job("common tensors", partial(copy_tensors, context, batch), files, total))
    return jobs


def _batches(tensors: Sequence[TensorInfo], *, by_file: bool) -> Iterator[list[TensorInfo]]:
    batch: list[TensorInfo] = []
    filled = 0
    for tensor in tensors:
        if batch and (filled >= COPY_JOB_BYTES or (by_file and tensor.file != batch[0].file)):
            yield batch
            batch, filled = [], 0
        batch.append(tensor)
        filled += tensor.total_bytes
    if batch:
        yield batch


def missing_bytes(plan: Plan, output: OutputFolder) -> int:
    """Return the bytes of the shards that are not finished."""
    left = (shard for shard in plan.shards if shard.file not in output.finished)
    return sum(shard.layout.total_bytes for shard in left)


def write_files(plan: Plan, output: OutputFolder) -> Iterator[tuple[str, int, str]]:
    """Write `config.json`, wrapped, and copy the small files."""
    names = [CONFIG_FILE, *plan.small_files]
    output.note_files(names)
    for name in sorted(names):
        if name == CONFIG_FILE:
            data = wrapped_config(plan.checkpoint.config)
        else:
            data = read_small_file(plan, name)
        yield (name, *output.write_file(name, data))


def promised(manifest: Manifest) -> list[str]:
    """Return the names of the files that a manifest promises."""
    return [*(s.file for s in manifest.shards), *(f.name for f in manifest.files)]


def refuse_overlap(source: Path, out: Path) -> None:
    """Refuse an output folder in the source, and one around it.

    Raises:
        InvalidUsage: It is one.
    """
    source, out = source.resolve(), out.resolve()
    if out == source or source in out.parents or out in source.parents:
        raise InvalidUsage(
            f"`{printable(str(out))}` and the source `{printable(str(source))}` lie in each other",
            "choose an output folder outside the source: nothing is ever written into it",
        )
