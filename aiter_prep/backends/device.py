"""What backends that use torch share: up to the device, permute, down again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from aiter_prep.backends.cpu import CpuBackend
from aiter_prep.backends.lanes import Lane, Lanes, full, pinned
from aiter_prep.backends.slices import Slice, cut
from aiter_prep.storage.scratch import Scratch, plain_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiter_prep.backends.table import PlacedPart
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.storage.buffers import ByteArray

# A copy of less costs more in its launch than in the bus: put together on the host, then.
LEAST_COPY_BYTES = 128 * 1024


class DeviceBackend(ABC):
    """Lays out experts on a device of torch.

    On a GPU, slices of a call take turns on a few lanes, each a stream: while one goes up, another
    is permuted and a third comes down. Threads call at the same time and share the lanes.

    Args:
        torch: The module.
        device: A device of type `cpu` or `cuda`; ROCm's torch calls its GPUs `cuda`, too.
        device_memory: Most bytes that it takes of a GPU's memory.
    """

    name: str
    chunk_bytes = 32 * 1024 * 1024
    lane_buffers: int
    lane_temporaries: int

    def __init__(self, torch: Any, device: Any, device_memory: int) -> None:
        self._torch = torch
        self._device = device
        self._scratch = Scratch()
        self._cpu = CpuBackend()
        self._lanes = (
            Lanes(torch, device, device_memory, self.lane_buffers, self.lane_temporaries)
            if device.type == "cuda"
            else None
        )

    @property
    def device(self) -> str:
        """The device's name."""
        return str(self._device)

    @property
    def provenance(self) -> Mapping[str, str | None]:
        """What manifests record of where the permutations come from."""
        return {"aiter_version": None}

    @abstractmethod
    def permute(self, layout: Layout, matrix: Any, room: Sequence[Any]) -> Any:
        """Return the stored bytes of matrices that lie on the device.

        Args:
            layout: Order of the bytes.
            matrix: C-contiguous uint8 `[experts, rows, row_bytes]`.
            room: `lane_buffers` - 1 buffers of as many bytes, to be used at will.

        Returns:
            C-contiguous uint8 of as many bytes.
        """

    def buffer(self, size: int) -> ByteArray:
        """Return memory of the host from which the device copies fastest."""
        if self._lanes is None:
            return plain_memory(size)
        return pinned(self._torch, self._device, size)

    def lay_out(self, layout: Layout, parts: Sequence[PlacedPart], stored: ByteArray) -> None:
        """Place parts of many experts' matrices; see `CpuBackend.lay_out`."""
        whole = Slice(tuple(parts), stored)
        if layout.order == tuple(range(len(layout.order))):
            self._cpu.lay_out(layout, parts, stored)  # nothing to permute: no way to the device
        elif self._lanes is None:
            self._lay_out_in_place(layout, whole)
        else:
            self._stream(self._lanes, layout, whole)

    def _lay_out_in_place(self, layout: Layout, whole: Slice) -> None:
        matrix = self._scratch.take("matrix", whole.stored.shape)
        whole.assemble_into(matrix)
        stored = self._torch.from_numpy(whole.stored.reshape(-1))
        room = [stored] * (self.lane_buffers - 1)
        stored.copy_(self.permute(layout, self._torch.from_numpy(matrix), room).reshape(-1))

    def _stream(self, lanes: Lanes, layout: Layout, whole: Slice) -> None:
        """Send slices through lanes in turn; a lane is waited for before it is used again."""
        with lanes.lent() as lent:
            left = [*cut(layout, whole, lent[0].size)][::-1]
            turn = 0
            while left:
                piece = left.pop()
                lane = lent[turn % len(lent)]
                lane.wait()
                try:
                    self._submit(lane, layout, piece)
                except self._torch.OutOfMemoryError as fault:
                    left += self._smaller(lent, layout, piece, fault)
                turn += 1

    def _smaller(
        self, lent: Sequence[Lane], layout: Layout, piece: Slice, fault: Exception
    ) -> list[Slice]:
        """Return a slice that found no room on the device as smaller ones, the last one first."""
        for lane in lent:
            lane.wait()
        self._torch.cuda.empty_cache()
        smaller = [*cut(layout, piece, piece.stored.nbytes // 2)]
        if len(smaller) == 1:
            raise full(self._device) from fault
        return smaller[::-1]

    def _submit(self, lane: Lane, layout: Layout, piece: Slice) -> None:
        size = piece.stored.nbytes
        if size > lane.size:  # a single tile, or a layout whose experts cannot be cut
            self._cpu.lay_out(layout, piece.parts, piece.stored)
            return
        with self._torch.cuda.stream(lane.stream):
            try:
                matrix = lane.buffers[0][:size].view(piece.stored.shape)
                self._up(lane, piece, matrix)
                room = [buffer[:size] for buffer in lane.buffers[1:]]
                result = self.permute(layout, matrix, room).reshape(-1)
                stored = self._torch.from_numpy(piece.stored.reshape(-1))
                stored.copy_(result, non_blocking=True)
            finally:
                lane.note()

    def _up(self, lane: Lane, piece: Slice, matrix: Any) -> None:
        """Copy a slice's matrices to the device."""
        from_numpy = self._torch.from_numpy
        if not _goes_up_as_it_is(piece):
            staging = lane.staging[: piece.stored.nbytes].reshape(piece.stored.shape)
            piece.assemble_into(staging)
            matrix.copy_(from_numpy(staging), non_blocking=True)
            return
        for part, row, _ in piece.parts:
            target = matrix[:, row : row + part.shape[1]]
            if _is_one_copy(piece, part):
                target.copy_(from_numpy(part), non_blocking=True)
                continue
            for expert, source in enumerate(part):
                target[expert].copy_(from_numpy(source), non_blocking=True)


def _goes_up_as_it_is(piece: Slice) -> bool:
    """Return whether a slice consists of whole rows, in blocks that are worth a copy each."""
    return piece.is_covered and all(
        part.shape[2] == piece.stored.shape[2]
        and part[0].flags.c_contiguous
        and (_is_one_copy(piece, part) or part[0].nbytes >= LEAST_COPY_BYTES)
        for part, _, _ in piece.parts
    )


def _is_one_copy(piece: Slice, part: ByteArray) -> bool:
    """Return whether a part lies in one block on both sides."""
    return part.flags.c_contiguous and (len(part) == 1 or part.shape == piece.stored.shape)
