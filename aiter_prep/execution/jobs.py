"""The hot path: reads a chunk of experts once, lays out every rank's share, writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiter_prep.errors import Interrupted
from aiter_prep.execution.writers import read_matrices, writer_of
from aiter_prep.storage.digest import Digest
from aiter_prep.storage.output import Written
from aiter_prep.storage.reader import chunks

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from aiter_prep.backends.table import Backend
    from aiter_prep.execution.sink import Sink
    from aiter_prep.execution.writers import Writer
    from aiter_prep.plan.make import BlockPlan
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.storage.reader import FolderReader
    from aiter_prep.storage.scratch import Scratch

CHUNK_BYTES = 8 * 1024 * 1024
MOST_CHUNK_BYTES = 64 * 1024 * 1024  # for each worker, unless one expert is larger


@dataclass(frozen=True, slots=True)
class Context:
    """What every job needs.

    Attributes:
        reader: The source.
        shards: The output.
        scratch: Buffers of each thread.
        backend: What moves the bytes.
        stop: Set when the run is to end early.
        advance: Called with the number of source bytes that were read.
    """

    reader: FolderReader
    shards: Sink
    scratch: Scratch
    backend: Backend
    stop: threading.Event
    advance: Callable[[int], None]

    def check(self) -> None:
        """Leave the job if the run is to end.

        Raises:
            Interrupted: It is.
        """
        if self.stop.is_set():
            raise Interrupted("stopped")


def run_block(context: Context, plan: BlockPlan, *, only_lossy: bool = False) -> None:
    """Convert one experts module for every rank that is not finished.

    Args:
        context: What to run with.
        plan: The module.
        only_lossy: Leave out what could be undone; to compare the rest with a folder.

    Raises:
        BadSource: A shard of the source ended too early.
        NoRule: A value has no place in the target's dtype.
    """
    stacks = [stack for stack in plan.stacks if stack.is_lossy or not only_lossy]
    writers = [writer_of(context, stack) for stack in stacks]
    writers = [writer for writer in writers if writer.steps]
    sources = {s.pattern: s for w in writers for s in (*w.stack.sources, *w.stack.scales)}
    expert_bytes = sum(source.rows * source.row_bytes for source in sources.values())
    at_once = _experts_at_once(context, writers, expert_bytes)
    for first in range(0, plan.block.num_experts if writers else 0, at_once):
        context.check()
        experts = range(first, min(first + at_once, plan.block.num_experts))
        matrices = read_matrices(context, sources.values(), experts)
        for writer in writers:
            writer.write(experts, matrices)
        context.advance(expert_bytes * len(experts))
    for writer in writers:
        writer.complete()


def _experts_at_once(context: Context, writers: Sequence[Writer], expert_bytes: int) -> int:
    """Return how many experts make up a chunk: more for many ranks, each of which has calls."""
    shares = max((len(writer.steps) for writer in writers), default=1)
    chunk_bytes = min(context.backend.chunk_bytes * shares, MOST_CHUNK_BYTES)
    return max(1, chunk_bytes // max(1, expert_bytes))


def copy_tensors(context: Context, tensors: Sequence[TensorInfo]) -> None:
    """Copy common tensors, byte for byte.

    Raises:
        BadSource: A shard of the source ended too early.
    """
    for tensor in tensors:
        digest = Digest()
        buffer = context.scratch.take("copy", (min(CHUNK_BYTES, tensor.total_bytes),))
        for offset, data in chunks(tensor, context.reader, buffer):
            context.check()
            digest.update(data)
            context.shards.write(None, tensor.name, offset, data)
            context.advance(data.nbytes)
        context.shards.complete(None, tensor.name, Written(digest.text()))
