"""Holds a backend to our own layouts, on a few bytes of each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiter_prep.errors import AiterPrepError
from aiter_prep.layouts.table import LAYOUTS, layout_named
from aiter_prep.storage.digest import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiter_prep.backends.table import Backend
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.storage.buffers import ByteArray

EXPERTS = 3
ROW_BYTES = 128
TILES = 2
POISON = 0xA5


@dataclass(frozen=True, slots=True)
class LayoutProbe:
    """What a backend made of one layout.

    Attributes:
        layout: Its name.
        ours: Digest of the bytes that our layout brings.
        theirs: Digest of the bytes that the backend brought, or None where it brought none.
        fault: Why it brought none.
    """

    layout: str
    ours: str
    theirs: str | None
    fault: str = ""

    @property
    def matches(self) -> bool:
        """Whether the backend brought our bytes."""
        return self.theirs == self.ours


@dataclass(frozen=True, slots=True)
class Probe:
    """What a backend made of some layouts.

    Attributes:
        backend: Its name.
        device: Its device.
        layouts: One after the other.
    """

    backend: str
    device: str
    layouts: tuple[LayoutProbe, ...]

    @property
    def ours(self) -> str:
        """Fingerprint of what our layouts bring."""
        return _fingerprint((probe.layout, probe.ours) for probe in self.layouts)

    @property
    def theirs(self) -> str:
        """Fingerprint of what the backend brought."""
        return _fingerprint((probe.layout, str(probe.theirs)) for probe in self.layouts)

    @property
    def matches(self) -> bool:
        """Whether the backend brought our bytes of every layout."""
        return all(probe.matches for probe in self.layouts)

    def require(self) -> None:
        """Check that the backend brought our bytes.

        Raises:
            AiterPrepError: It did not.
        """
        wrong = [probe for probe in self.layouts if not probe.matches]
        if wrong:
            first = wrong[0]
            raise AiterPrepError(
                f"backend `{self.backend}` on `{self.device}` brings other bytes than ours: "
                f"its fingerprint is {self.theirs}, ours is {self.ours}; "
                f"layout `{first.layout}`: {first.fault or f'{first.theirs}, not {first.ours}'}",
                "its kernels may want another layout than this version of aiter-prep knows; "
                "--backend cpu writes ours",
            )


def probe(backend: Backend, layouts: Iterable[str] | None = None) -> Probe:
    """Let a backend lay out a few experts in some layouts, or in all."""
    names = LAYOUTS if layouts is None else sorted(set(layouts))
    return Probe(
        backend.name, backend.device, tuple(_probe(backend, layout_named(name)) for name in names)
    )


@dataclass(frozen=True, slots=True)
class AiterProbe:
    """What the AITER of this machine brings.

    Attributes:
        version: Its version, if it says one.
        commit: The commit that it was built from, if it says one.
        folder: Where it lies.
        probe: What it made of the layouts that it has functions for.
        missing: The layouts that it has no function for: newer releases have more.
    """

    version: str | None
    commit: str | None
    folder: str
    probe: Probe
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what it says as plain values."""
        found = {**asdict(self), **asdict(self.probe)}
        del found["probe"]
        return {
            **found,
            "ours": self.probe.ours,
            "theirs": self.probe.theirs,
            "matches": self.matches,
        }

    @property
    def matches(self) -> bool:
        """Whether it brought our bytes of every layout that it has a function for, of one or more.

        A layout that it has no function for is refused by the conversion that needs it.
        """
        return bool(self.probe.layouts) and self.probe.matches

    def require(self) -> None:
        """Check that it brought our bytes.

        Raises:
            AiterPrepError: It did not, or has no function for any layout.
        """
        if not self.probe.layouts:
            raise AiterPrepError(
                f"AITER {self.version or ''} in `{self.folder}` has no function for any of "
                f"{len(self.missing)} layouts".replace("  ", " "),
                "use a newer AITER, or convert with --backend cpu",
            )
        self.probe.require()


def probe_aiter(device: str | None = None) -> AiterProbe:
    """Hold the AITER of this machine to our layouts.

    Args:
        device: Where its functions run: the first GPU by default, or the CPU where there is none,
            as in the build of an image.

    Raises:
        AiterPrepError: torch or AITER is missing or cannot be imported.
        InvalidUsage: There is no such device.
    """
    from aiter_prep.backends.aiter_package import find_aiter
    from aiter_prep.backends.aiter_rocm import CALLS, AiterBackend
    from aiter_prep.backends.choices import DEFAULT_DEVICE_MEMORY, device_of, import_torch

    torch = import_torch()
    found = find_aiter()
    backend = AiterBackend(torch, device_of(torch, device), DEFAULT_DEVICE_MEMORY, found)
    offered = [name for name, call in CALLS.items() if found.functions.keys() >= {*call.needs}]
    missing = tuple(sorted(CALLS.keys() - set(offered)))
    return AiterProbe(found.version, found.commit, found.folder, probe(backend, offered), missing)


def sample(layout: Layout) -> ByteArray:
    """Return experts of a few tiles, of bytes in no order.

    The rows of all experts together are no multiple of 256, so AITER's padding is probed as well.
    """
    shape = (EXPERTS, TILES * layout.row_multiple(), ROW_BYTES)
    numbers = np.arange(np.prod(shape), dtype=np.uint64)
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(56)).astype(np.uint8).reshape(shape)


def _probe(backend: Backend, layout: Layout) -> LayoutProbe:
    matrix = sample(layout)
    ours = digest_of(layout.apply(matrix))
    stored = np.full(matrix.shape, POISON, np.uint8)
    try:
        backend.lay_out(layout, [(matrix, 0, 0)], stored)
    except Exception as fault:  # noqa: BLE001 - AITER refuses with whatever comes to hand
        return LayoutProbe(layout.name, ours, None, f"{type(fault).__name__}: {fault}")
    return LayoutProbe(layout.name, ours, digest_of(stored))


def _fingerprint(digests: Iterable[tuple[str, Any]]) -> str:
    return digest_of("\n".join(f"{name} {digest}" for name, digest in digests).encode())
