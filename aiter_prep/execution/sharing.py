"""Shares a conversion between processes, each of which writes whole shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.backends.table import Backend, choose_backend
from aiter_prep.errors import AiterPrepError
from aiter_prep.execution.bundles import Bundle, Part, bundles_of_part
from aiter_prep.execution.fingerprint import digest_of_facts, facts_of
from aiter_prep.execution.record import arguments_of, created_by, shard_digest
from aiter_prep.execution.run import Run, layouts_of, refuse_overlap, run_jobs
from aiter_prep.execution.shardset import ShardSet
from aiter_prep.execution.source import check_source_unchanged
from aiter_prep.storage.files import local_path
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.parts import PartsFolder, place_for_parts
from aiter_prep.storage.threads import checked_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiter_prep.plan.make import Plan
    from aiter_prep.plan.shards import Shard
    from aiter_prep.progress import Progress


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that several processes share.

    Attributes:
        plan: What is to be done.
        out: The folder to write.
        place: Where its shards wait until it is sealed: in it, or beside it.
        digest: Stands for all that the processes must agree on.
        request: How the plan was made, for those who make it again.
    """

    plan: Plan
    out: Path
    place: Path
    digest: str
    request: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Share:
    """What a process wrote of a conversion.

    Attributes:
        digests: The shards that were its task, by name: tree digest of each.
        total_bytes: Their bytes.
        written_bytes: Bytes of those that it wrote; the others were there already.
    """

    digests: Mapping[str, str]
    total_bytes: int
    written_bytes: int


def shared_conversion(plan: Plan, out: str | Path, *, overwrite: bool = False) -> Conversion:
    """Return a conversion that several processes can share.

    Args:
        plan: What is to be done.
        out: The folder to write.
        overwrite: Replace a prepared folder, when it is sealed.

    Raises:
        OutputNotEmpty: The folder may not be replaced.
        InvalidUsage: The folder and the source lie in each other.
    """
    out = local_path(out, "the folder to write", "write to a local folder, then `push` it")
    refuse_overlap(plan.checkpoint.folder, out)
    facts = facts_of(plan)
    is_remote = plan.checkpoint.remote is not None
    request = {
        "arguments": arguments_of(plan),
        "facts": facts,
        "source": {
            "folder": None if is_remote else str(plan.checkpoint.folder.resolve()),
            "name": plan.checkpoint.name,
            "revision": plan.checkpoint.revision,
        },
    }
    place = place_for_parts(out, overwrite=overwrite)
    return Conversion(plan, out, place, digest_of_facts(facts), request)


def execute_part(
    plan: Plan,
    out: str | Path,
    part: Part,
    *,
    backend: Backend | str = "auto",
    workers: int | None = None,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Share:
    """Write one part of the prepared folder that a plan describes; `seal` completes the folder.

    Parts may run at once, on any machines that share the filesystem, and be killed and repeated:
    a part that runs again goes on behind the last shard that it finished. Of a source that lies
    elsewhere each part fetches the shards that it needs, and deletes them.

    Args:
        plan: From `make_plan`; the same for every part.
        out: The folder to write; the same for every part.
        part: Which part.
        backend: What moves the bytes: a name, or what `choose_backend` returned.
        workers: Threads; one per usable core by default.
        overwrite: Replace a prepared folder: it stays as it is until the new one is sealed. The
            same for every part.
        progress: Called now and then.

    Raises:
        OutputNotEmpty: `out` holds something else, or parts of another plan.
        BadSource: The source changed or cannot be read.
        NoRule: A value has no place in the target's dtype.
        AiterPrepError: The disk is full or fails.
    """
    workers = checked_workers(workers)
    if isinstance(backend, str):
        backend, _ = choose_backend(backend, layouts=layouts_of(plan))
    label = f"part-{part.number}-of-{part.count}"
    conversion = shared_conversion(plan, out, overwrite=overwrite)
    bundles = bundles_of_part(plan, part)
    return write_bundles(conversion, bundles, label, backend, workers, progress)


def write_bundles(
    conversion: Conversion,
    bundles: Sequence[Bundle],
    label: str,
    backend: Backend,
    workers: int,
    progress: Callable[[Progress], None] | None = None,
) -> Share:
    """Write some bundles of a conversion, but for those of their shards that are there already.

    Args:
        conversion: The conversion.
        bundles: What to write.
        label: What the process is called; no two that run at once are called the same.
        backend: What moves the bytes.
        workers: Threads.
        progress: Called now and then.

    Raises:
        As `execute_part`.
    """
    try:
        return _write_bundles(conversion, bundles, label, backend, workers, progress)
    except OSError as fault:
        raise AiterPrepError(
            f"cannot write `{printable(str(conversion.out))}`: {fault.strerror}",
            "mend the cause and run the same command again; what is finished is not written again",
        ) from fault


def _write_bundles(
    conversion: Conversion,
    bundles: Sequence[Bundle],
    label: str,
    backend: Backend,
    workers: int,
    progress: Callable[[Progress], None] | None,
) -> Share:
    plan = conversion.plan
    mine = [shard for bundle in bundles for shard in bundle.shards]
    folder = PartsFolder(conversion.place, conversion.digest)
    check_source = partial(check_source_unchanged, plan)
    with folder.begin(label, conversion.request, created_by(backend), check_source) as folder:
        left = [shard for shard in mine if folder.note_of(shard.layout) is None]
        left_bytes = sum(shard.layout.total_bytes for shard in left)
        folder.finished = {s.file for s in plan.shards} - {shard.file for shard in left}
        folder.require_space(left_bytes)
        shards = ShardSet(folder, plan.shards)
        try:
            run_jobs(plan, Run(shards, backend, workers, progress, folder.fetched))
        except BaseException:
            shards.discard()
            raise
        digests = {shard.file: _digest_noted(folder, shard) for shard in mine}
    return Share(digests, sum(bundle.total_bytes for bundle in bundles), left_bytes)


def _digest_noted(folder: PartsFolder, shard: Shard) -> str:
    """Return the digest of a shard as it is noted.

    Raises:
        AiterPrepError: It was removed meanwhile.
    """
    note = folder.noted(shard.layout)
    if note is None:
        raise AiterPrepError(
            f"`{printable(shard.file)}` was written, but is gone from "
            f"`{printable(str(folder.folder))}`",
            "the folder was sealed or removed by another process",
        )
    return shard_digest(shard, note.tensors)
