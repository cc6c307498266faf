"""Buffers that a thread uses again and again, instead of fresh memory for every chunk."""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aiter_prep.storage.buffers import ByteArray


class Scratch(threading.local):
    """One set of buffers per thread.

    Fresh memory costs a page fault every 4 KiB, as much time as the copy into it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, ByteArray] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> ByteArray:
        """Return a C-contiguous buffer of this shape; its content is arbitrary.

        What was taken under the same name before, in this thread, is no longer valid.
        """
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].reshape(shape)
