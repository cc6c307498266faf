"""Reads byte ranges of many files through one pool of descriptors."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError, BadSource
from aiter_prep.storage.descriptors import limit_of_process
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from aiter_prep.storage.buffers import Writable
    from aiter_prep.storage.header import TensorInfo

CHUNK_BYTES = 1024 * 1024  # small enough to be in the cache still when it is looked at
MAX_OPEN_FILES = 64
OF_THE_LIMIT = 8  # a reader keeps an eighth of what a process may have open at most
MAX_VECTORS = 512  # the kernel takes at most IOV_MAX, 1024


class FolderReader:
    """Reads ranges of the files of one folder; safe to share between threads.

    Args:
        folder: The folder; nothing is ever written into it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, list[int]] = OrderedDict()
        self._idle_count = 0
        self._most_idle = min(MAX_OPEN_FILES, limit_of_process() // OF_THE_LIMIT)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read_into(self, file: str, start: int, buffer: Writable) -> None:
        """Fill a C-contiguous buffer with the bytes of a file from `start` on.

        Raises:
            BadSource: The file cannot be read, or ends too early.
        """
        self.read_all([(file, start, buffer)])

    def read_all(self, ranges: Sequence[tuple[str, int, Writable]]) -> None:
        """Fill many C-contiguous buffers, each from a file and an offset.

        Ranges that follow each other in a file are read by one call.

        Raises:
            BadSource: A file cannot be read, or ends too early.
        """
        for file, start, views in _runs(sorted(ranges, key=lambda item: item[:2])):
            self._read_run(file, start, views)

    def _read_run(self, file: str, start: int, views: list[memoryview]) -> None:
        with self.opened(file) as descriptor:
            _fill(descriptor, start, views, file)

    def close(self) -> None:
        """Close every descriptor; those that are lent, when they come back."""
        with self._lock:
            self._is_closed = True
            for descriptors in self._idle.values():
                for descriptor in descriptors:
                    os.close(descriptor)
            self._idle.clear()
            self._idle_count = 0

    def forget(self, file: str) -> None:
        """Close what is open of a file, so that its space comes back when it is deleted."""
        with self._lock:
            for descriptor in self._idle.pop(file, []):
                os.close(descriptor)
                self._idle_count -= 1

    @contextmanager
    def opened(self, file: str) -> Iterator[int]:
        """Lend a descriptor of a file, from the pool.

        Raises:
            BadSource: The file cannot be opened, or a read of it fails meanwhile.
            AiterPrepError: The process has too many files open.
        """
        try:
            descriptor = self._borrow(file)
            try:
                yield descriptor
            finally:
                self._give_back(file, descriptor)
        except OSError as fault:
            if fault.errno in (errno.EMFILE, errno.ENFILE):  # this is not the file's fault
                raise AiterPrepError(
                    f"cannot open `{printable(file)}`: {fault.strerror} ({limit_of_process()})",
                    "allow more with `ulimit -n`, or take fewer --workers",
                ) from fault
            raise BadSource(f"cannot read `{printable(file)}`: {fault.strerror}") from fault

    def _borrow(self, file: str) -> int:
        with self._lock:
            descriptors = self._idle.get(file)
            if descriptors:
                self._idle_count -= 1
                return descriptors.pop()
        return os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)

    def _give_back(self, file: str, descriptor: int) -> None:
        with self._lock:
            if self._is_closed:
                os.close(descriptor)
                return
            self._idle.setdefault(file, []).append(descriptor)
            self._idle.move_to_end(file)
            self._idle_count += 1
            while self._idle_count > self._most_idle:
                oldest, descriptors = next(iter(self._idle.items()))
                if descriptors:
                    os.close(descriptors.pop())
                    self._idle_count -= 1
                if not descriptors:
                    del self._idle[oldest]


def chunks(
    info: TensorInfo, reader: FolderReader, buffer: Writable | None = None
) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of a tensor, a chunk at a time, each with its offset in the tensor.

    A chunk is valid until the next one is asked for.

    Args:
        info: The tensor.
        reader: A reader of its folder.
        buffer: What to read into; its size is that of a chunk. Fresh memory by default.

    Raises:
        BadSource: The file cannot be read, or ends too early.
    """
    if buffer is None:
        buffer = bytearray(min(CHUNK_BYTES, info.total_bytes))
    view = memoryview(buffer).cast("B")
    with reader.opened(info.file) as descriptor:
        for offset in range(0, info.total_bytes, max(1, len(view))):
            data = view[: info.total_bytes - offset]
            _fill(descriptor, info.start + offset, [data], info.file)
            yield offset, data


def _runs(
    ranges: Sequence[tuple[str, int, Writable]],
) -> Iterator[tuple[str, int, list[memoryview]]]:
    """Join sorted ranges that follow each other in one file."""
    run: list[memoryview] = []
    file, start, end = "", 0, -1
    for next_file, next_start, buffer in ranges:
        view = memoryview(buffer).cast("B")
        if run and (next_file, next_start) == (file, end) and len(run) < MAX_VECTORS:
            run.append(view)
        else:
            if run:
                yield file, start, run
            file, start, run = next_file, next_start, [view]
        end = next_start + len(view)
    if run:
        yield file, start, run


def _fill(descriptor: int, start: int, views: list[memoryview], file: str) -> None:
    """Read until every view is full; the kernel may hand out less than was asked for."""
    views = [view for view in views if len(view)]
    while views:
        count = os.preadv(descriptor, views, start)
        if count == 0:
            raise BadSource(
                f"`{printable(file)}` ended at byte {start}, but its header promises more",
                "it changed while it was read",
            )
        start += count
        while views and count >= len(views[0]):
            count -= len(views[0])
            views = views[1:]
        if count:
            views = [views[0][count:], *views[1:]]
