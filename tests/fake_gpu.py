"""A torch whose GPU is a piece of main memory, which can be full."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


class FakeGpu:
    """Stands in for the module `torch` in a backend.

    Args:
        total_bytes: Memory of the GPU.
    """

    def __init__(self, total_bytes: int = 1 << 30) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.most_bytes = 0
        self.cuda = SimpleNamespace(
            Stream=lambda device: SimpleNamespace(device=device),
            Event=FakeEvent,
            stream=lambda _stream: contextlib.nullcontext(),
            device=lambda _device: contextlib.nullcontext(),
            empty_cache=lambda: None,
            is_available=lambda: True,
            device_count=lambda: 1,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: str) -> FakeDevice | torch.device:
        """Return the device of this name."""
        return FakeDevice(name) if name.startswith("cuda") else torch.device(name)

    def empty(
        self, size: int, *, dtype: Any, device: Any = None, pin_memory: bool = False
    ) -> torch.Tensor:
        """Allocate: on the GPU if a device is named, else pinned."""
        memory = torch.full((size,), 0xA5, dtype=dtype)
        if device is None:
            assert pin_memory
            return memory
        if self.used_bytes + size > self.total_bytes:
            raise torch.OutOfMemoryError("the fake GPU is full")
        self.used_bytes += size
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        weakref.finalize(memory, self._free, size)
        return memory

    def _free(self, size: int) -> None:
        self.used_bytes -= size


@dataclass(frozen=True)
class FakeDevice:
    """A device that torch does not know."""

    name: str = "cuda:0"
    type: str = "cuda"

    @property
    def index(self) -> int:
        """Its number."""
        return int(self.name.partition(":")[2])

    def __str__(self) -> str:
        return self.name


class FakeEvent:
    """An event that has always happened."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking  # a thread that spins takes a core from the others

    def record(self, stream: object) -> None:
        """Take note."""

    def synchronize(self) -> None:
        """Return at once."""
