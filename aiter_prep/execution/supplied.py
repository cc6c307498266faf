"""Runs jobs on a source whose shards come while they run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiter_prep.execution.jobs import Context
    from aiter_prep.storage.supply import ShardSupply


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker does at a time.

    Attributes:
        what: What that is, for people.
        run: Does it.
        files: Shards of the source that it reads.
        total_bytes: Bytes of the source that it reads.
    """

    what: str
    run: Callable[[], None]
    files: frozenset[str]
    total_bytes: int


def supplied(jobs: Sequence[Job], supply: ShardSupply, context: Context) -> list[Job]:
    """Return jobs that fetch their shards first, in the order in which shards are needed.

    Args:
        jobs: What is left to do, in any order.
        supply: What brings the shards.
        context: What the jobs run with.

    Raises:
        InvalidUsage: One job needs more than may be on the disk at a time.
    """
    ordered = sorted(jobs, key=lambda job: (max(job.files, default=""), min(job.files, default="")))
    supply.begin([job.files for job in ordered], context.reader.forget)
    return [
        replace(job, run=partial(_run, job, number, supply, context))
        for number, job in enumerate(ordered)
    ]


def _run(job: Job, number: int, supply: ShardSupply, context: Context) -> None:
    with supply.holding(number, context.check):
        job.run()
