"""Lends lanes of a GPU, each a stream with buffers of its own, within a limit of memory."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiter_prep.storage.buffers import ByteArray

LANES_PER_CALL = 3  # one goes up, one is permuted, one comes down
LANE_BYTES = 16 * 1024 * 1024
LEAST_LANE_BYTES = 1024 * 1024


class Lane:
    """A stream and buffers on both sides.

    Args:
        torch: The module.
        device: The GPU.
        size: Bytes of each buffer.
        buffers: How many buffers it has on the GPU.

    Everything that is done in a lane is done in order, so its buffers need no further care.
    """

    def __init__(self, torch: Any, device: Any, size: int, buffers: int) -> None:
        self.size = size
        self.stream = torch.cuda.Stream(device)
        self._torch = torch
        self._done = torch.cuda.Event(blocking=True)  # a waiting thread leaves its core to others
        self._staging: Any = None
        with torch.cuda.stream(self.stream):
            self.buffers = [
                torch.empty(size, dtype=torch.uint8, device=device) for _ in range(buffers)
            ]

    @property
    def staging(self) -> ByteArray:
        """Pinned memory of the host in which a slice is put together before it goes up."""
        if self._staging is None:
            self._staging = pinned(self._torch, self.stream.device, self.size)
        staging: ByteArray = self._staging
        return staging

    def note(self) -> None:
        """Note that a slice was submitted."""
        self._done.record(self.stream)

    def wait(self) -> None:
        """Wait until every submitted slice has come down."""
        self._done.synchronize()


class Lanes:
    """Lends lanes to threads.

    Args:
        torch: The module.
        device: The GPU.
        limit: Most bytes of the GPU's memory that all lanes take together.
        buffers: Buffers of a lane.
        temporaries: Buffers of the same size that the permutation allocates by itself.

    Raises:
        AiterPrepError: The limit is below one lane of the least size.
    """

    def __init__(self, torch: Any, device: Any, limit: int, buffers: int, temporaries: int) -> None:
        self._torch = torch
        self._device = device
        self._buffers = buffers
        total = buffers + temporaries
        self._lane_bytes = min(LANE_BYTES, limit // total)
        if self._lane_bytes < LEAST_LANE_BYTES:
            raise AiterPrepError(
                f"{limit} bytes of device memory are too few: at least "
                f"{LEAST_LANE_BYTES * total} are needed",
                "give --device-memory more",
            )
        self._most = limit // (self._lane_bytes * total)
        self._made = 0
        self._idle: list[Lane] = []
        self._changed = threading.Condition()

    @contextmanager
    def lent(self) -> Iterator[list[Lane]]:
        """Lend as many lanes as one call needs, or fewer; waits until there is one.

        Raises:
            AiterPrepError: The GPU has no room for a single lane of the least size.
        """
        with self._changed:
            lanes: list[Lane] = []
            self._changed.wait_for(lambda: self._take_into(lanes))
            while len(lanes) < LANES_PER_CALL and self._take_into(lanes):
                pass
        try:
            yield lanes
        finally:
            for lane in lanes:
                lane.wait()
            with self._changed:
                self._idle += lanes
                self._changed.notify_all()

    def _take_into(self, lanes: list[Lane]) -> bool:
        """Add an idle lane or a new one; return False where neither can be had now."""
        if not self._idle and self._made < self._most:
            self._make()
        if not self._idle:
            return False
        lanes.append(self._idle.pop())
        return True

    def _make(self) -> None:
        """Make a lane; where the GPU is full, be content with those that exist, or halve it."""
        try:
            lane = Lane(self._torch, self._device, self._lane_bytes, self._buffers)
        except self._torch.OutOfMemoryError as fault:
            if self._made:
                self._most = self._made
                return
            self._lane_bytes //= 2
            if self._lane_bytes < LEAST_LANE_BYTES:
                raise full(self._device) from fault
            self._make()
        else:
            self._idle.append(lane)
            self._made += 1


def full(device: Any) -> AiterPrepError:
    """Return what to raise where even the smallest piece finds no room on a GPU."""
    return AiterPrepError(
        f"device `{device}` has no memory left, not even for a piece of an expert",
        "free some of it, choose another --device, or use --backend cpu",
    )


def pinned(torch: Any, device: Any, size: int) -> ByteArray:
    """Return memory of the host that a GPU can copy from and to by itself.

    Raises:
        AiterPrepError: There is not enough of it.
    """
    try:
        with torch.cuda.device(device):
            memory: ByteArray = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as fault:
        raise AiterPrepError(
            f"cannot pin {size} bytes of memory for `{device}`: {str(fault).partition(chr(10))[0]}",
            "use fewer --workers, or --backend cpu",
        ) from fault
    return memory
