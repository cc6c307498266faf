"""Every backend, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from aiter_prep.backends import choices
from aiter_prep.backends.choices import AUTO, DEFAULT_DEVICE_MEMORY, Wish
from aiter_prep.errors import NoRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.storage.buffers import ByteArray


# Bytes of many experts, `[experts, rows, columns]`, and the row and byte at which they begin.
PlacedPart: TypeAlias = "tuple[ByteArray, int, int]"


class Backend(Protocol):
    """What moves the bytes of experts into their layout; safe to share between threads."""

    @property
    def name(self) -> str:
        """Its name, as manifests record it."""

    @property
    def device(self) -> str:
        """The device that it runs on."""

    @property
    def chunk_bytes(self) -> int:
        """How many source bytes it likes to be given at once."""

    @property
    def provenance(self) -> Mapping[str, str | None]:
        """What manifests record besides: `aiter_version`, None unless AITER does the work."""

    def buffer(self, size: int) -> ByteArray:
        """Return memory that it reads and writes fastest."""

    def lay_out(self, layout: Layout, parts: Sequence[PlacedPart], stored: ByteArray) -> None:
        """Place parts of many experts' matrices; see `CpuBackend.lay_out`."""


# What `--backend` may say; each returns a backend and the reason why it is this one.
BACKENDS: dict[str, Callable[[Wish], tuple[Backend, str]]] = {
    AUTO: choices.use_best,
    "cpu": choices.use_cpu,
    "torch": choices.use_torch,
    "aiter": choices.use_aiter,
}


def choose_backend(
    name: str = AUTO,
    device: str | None = None,
    *,
    layouts: Iterable[str] | None = None,
    device_memory: int = DEFAULT_DEVICE_MEMORY,
) -> tuple[Backend, str]:
    """Return a backend, and the reason why it is this one.

    Args:
        name: A name of `BACKENDS`; `auto` is `aiter` on a ROCm host that has it, else `cpu`.
        device: `cpu`, `cuda` or `cuda:0`, `cuda:1`, ...; the backend's usual one by default.
        layouts: The layouts that it will be asked for; all by default.
        device_memory: Most bytes that it takes of a GPU's memory.

    Raises:
        NoRule: There is no such backend.
        InvalidUsage: The backend does not run on this device.
        AiterPrepError: A package is missing, or AITER brings other bytes than ours.
    """
    if name not in BACKENDS:
        raise NoRule(f"backend `{name}` is not known", f"known backends: {', '.join(BACKENDS)}")
    wanted = None if layouts is None else tuple(sorted(set(layouts)))
    return BACKENDS[name](Wish(device, wanted, device_memory))


def backend_named(name: str) -> Backend:
    """Return the backend of this name on its usual device.

    Raises:
        NoRule: There is none.
        AiterPrepError: A package is missing, or AITER brings other bytes than ours.
    """
    return choose_backend(name)[0]
