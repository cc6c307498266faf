"""Every backend, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from aiter_prep.backends.cpu import CpuBackend
from aiter_prep.errors import NoRule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.storage.buffers import ByteArray


# Bytes of many experts, `[experts, rows, columns]`, and the row and byte at which they begin.
PlacedPart: TypeAlias = "tuple[ByteArray, int, int]"


class Backend(Protocol):
    """What moves the bytes of experts into their layout.

    Attributes:
        name: Its name, as manifests record it.
        device: The device that it runs on.
        aiter_version: Version of AITER, where AITER does the work.
    """

    name: str
    device: str
    aiter_version: str | None

    def lay_out(self, layout: Layout, parts: Sequence[PlacedPart], stored: ByteArray) -> None:
        """Place parts of many experts' matrices; see `CpuBackend.lay_out`."""


BACKENDS: dict[str, Callable[[], Backend]] = {"cpu": CpuBackend}


def backend_named(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        NoRule: There is none.
    """
    try:
        return BACKENDS[name]()
    except KeyError:
        raise NoRule(
            f"backend `{name}` is not known", f"known backends: {', '.join(BACKENDS)}"
        ) from None
