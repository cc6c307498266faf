"""Carries out a plan: streams, bounds memory, resumes, seals."""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep._version import __version__
from aiter_prep.backends.table import Backend, choose_backend
from aiter_prep.errors import AiterPrepError, Interrupted, InvalidUsage
from aiter_prep.execution.jobs import Context, copy_tensors, run_block
from aiter_prep.execution.record import manifest_of, wrapped_config
from aiter_prep.execution.shardset import ShardSet
from aiter_prep.execution.source import check_source_unchanged, read_small_file
from aiter_prep.execution.supplied import Job, supplied
from aiter_prep.storage import jsontext
from aiter_prep.storage.checkpoint import CONFIG_FILE
from aiter_prep.storage.digest import digest_of
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import OutputFolder
from aiter_prep.storage.reader import FolderReader
from aiter_prep.storage.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aiter_prep.manifest import Manifest
    from aiter_prep.plan.make import Plan
    from aiter_prep.storage.header import TensorInfo

MAX_WORKERS = 256
COPY_JOB_BYTES = 256 * 1024 * 1024
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        done_bytes: Source bytes that were read.
        total_bytes: Source bytes that this run reads.
    """

    done_bytes: int
    total_bytes: int


def default_workers() -> int:
    """Return one worker per usable core, at most 16."""
    return min(16, len(os.sched_getaffinity(0)))


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
    threads = default_workers() if workers is None else workers
    if not 1 <= threads <= MAX_WORKERS:
        raise InvalidUsage(f"--workers {threads} is out of range: 1 to {MAX_WORKERS}")
    if isinstance(backend, str):
        backend, _ = choose_backend(backend, layouts=layouts_of(plan))
    out = Path(out)
    _refuse_overlap(plan.checkpoint.folder, out)
    try:
        return _execute(plan, out, backend, threads, progress, resume=resume, overwrite=overwrite)
    except OSError as fault:
        raise AiterPrepError(
            f"cannot write `{printable(str(out))}`: {fault.strerror}",
            "finished shards stay: mend the cause and go on with --resume",
        ) from fault


def layouts_of(plan: Plan) -> tuple[str, ...]:
    """Return the names of all layouts that a plan asks for."""
    return tuple(sorted({s.layout.name for block in plan.blocks for s in block.stacks}))


def fingerprint_of(plan: Plan) -> str:
    """Return a digest of everything that decides the bytes of the result."""
    return digest_of(
        jsontext.canonical(
            {
                "version": __version__,
                "headers": [digest_of(shard.layout.header) for shard in plan.shards],
                # with the time of the last change: other weights may have the same header
                "source": [
                    [h.file, h.file_bytes, h.mtime_ns, h.digest] for h in plan.checkpoint.headers
                ],
                "states": plan.checkpoint.supply.states if plan.checkpoint.supply else {},
                "target": [plan.target.name, plan.gfx, list(plan.ranks), plan.options],
                "options": [
                    plan.as_common,
                    plan.fuse_shared_experts,
                    plan.max_shard_bytes,
                    plan.trust_tensors,
                ],
                "parallel": [plan.parallel.tp, plan.parallel.ep, plan.parallel.placement],
            }
        )
    )


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
    with (
        FolderReader(plan.checkpoint.folder) as reader,
        OutputFolder(
            out, fingerprint=fingerprint_of(plan), resume=resume, overwrite=overwrite
        ) as output,
    ):
        output.keep_only({shard.file: shard.layout for shard in plan.shards})
        output.require_space(_missing_bytes(plan, output))
        shards = ShardSet(output, plan.shards)
        try:
            _run_jobs(plan, _Run(reader, shards, backend, workers, progress))
            check_source_unchanged(plan)
        except BaseException:
            shards.discard()
            raise
        files = list(_write_files(plan, output))
        manifest = manifest_of(plan, backend, output.finished, files)
        output.seal(manifest.to_json(), [*output.finished, *(name for name, *_ in files)])
        if plan.checkpoint.supply is not None:
            plan.checkpoint.supply.clear()
        return manifest


@dataclass(frozen=True, slots=True)
class _Run:
    """What `_run_jobs` runs with."""

    reader: FolderReader
    shards: ShardSet
    backend: Backend
    workers: int
    progress: Callable[[Progress], None] | None


def _run_jobs(plan: Plan, run: _Run) -> None:
    """Run every job; the first failure or a Ctrl-C ends the others at their next chunk."""
    counter = _Counter()
    stop = threading.Event()
    context = Context(
        run.reader, run.shards, Scratch(run.backend.buffer), run.backend, stop, counter.add
    )
    jobs = _jobs(plan, context)
    total = sum(job.total_bytes for job in jobs)
    work = [job.run for job in jobs]
    if plan.checkpoint.supply is not None:
        work = supplied(jobs, plan.checkpoint.supply, context)
    pool = ThreadPoolExecutor(run.workers, thread_name_prefix="aiter-prep")
    futures = [pool.submit(job) for job in work]
    try:
        pending: set[Future[None]] = set(futures)
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if run.progress is not None:
                run.progress(Progress(counter.value, total))
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


class _Counter:
    """Counts bytes over threads."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.value += count


def _jobs(plan: Plan, context: Context) -> list[Job]:
    """Return what is left to do."""
    jobs: list[Job] = []
    for block in plan.blocks:
        if any(
            not context.shards.is_finished(step.rank, stack.name)
            for stack in block.stacks
            for step in stack.steps
        ):
            tensors = [t for s in block.stacks for x in (*s.sources, *s.scales) for t in x.tensors]
            run = partial(run_block, context, block)
            jobs.append(Job(run, frozenset(t.file for t in tensors), block.block.total_bytes))
    left = [t for t in plan.common if not context.shards.is_finished(None, t.name)]
    if plan.checkpoint.supply is not None:  # so that a batch needs one shard, not all of them
        left.sort(key=lambda tensor: (tensor.file, tensor.start))
    for batch in _batches(left, by_file=plan.checkpoint.supply is not None):
        total = sum(tensor.total_bytes for tensor in batch)
        files = frozenset(tensor.file for tensor in batch)
        jobs.append(Job(partial(copy_tensors, context, batch), files, total))
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


def _missing_bytes(plan: Plan, output: OutputFolder) -> int:
    left = (shard for shard in plan.shards if shard.file not in output.finished)
    return sum(shard.layout.total_bytes for shard in left)


def _write_files(plan: Plan, output: OutputFolder) -> Iterator[tuple[str, int, str]]:
    """Write `config.json`, wrapped, and copy the small files."""
    names = [CONFIG_FILE, *plan.small_files]
    output.note_files(names)
    for name in sorted(names):
        if name == CONFIG_FILE:
            data = wrapped_config(plan.checkpoint.config)
        else:
            data = read_small_file(plan, name)
        yield (name, *output.write_file(name, data))


def _refuse_overlap(source: Path, out: Path) -> None:
    source, out = source.resolve(), out.resolve()
    if out == source or source in out.parents or out in source.parents:
        raise InvalidUsage(
            f"`{printable(str(out))}` and the source `{printable(str(source))}` lie in each other",
            "choose an output folder outside the source: nothing is ever written into it",
        )


__all__ = ["Interrupted", "Progress", "default_workers", "execute", "fingerprint_of", "layouts_of"]
