"""Finds out which backend can run here, and says why."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiter_prep.backends import rocm
from aiter_prep.backends.cpu import CpuBackend
from aiter_prep.errors import AiterPrepError, InvalidUsage
from aiter_prep.layouts.table import LAYOUTS
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from aiter_prep.backends.aiter_rocm import AiterBackend
    from aiter_prep.backends.torch_device import TorchBackend

AUTO = "auto"
CPU = "cpu"
DEFAULT_DEVICE_MEMORY = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Wish:
    """What a backend is chosen for.

    Attributes:
        device: The device that was asked for, or None.
        layouts: The layouts that will be asked for, or None for all.
        device_memory: Most bytes of a GPU's memory.
    """

    device: str | None
    layouts: tuple[str, ...] | None
    device_memory: int


def use_cpu(wish: Wish) -> tuple[CpuBackend, str]:
    """Return the backend `cpu`; torch is not imported.

    Raises:
        InvalidUsage: Another device was asked for.
    """
    if wish.device not in {None, CPU}:
        raise InvalidUsage(
            f"backend `cpu` does not run on device `{printable(str(wish.device))}`",
            "use --backend torch or aiter for a GPU",
        )
    return CpuBackend(), "asked for"


def use_torch(wish: Wish) -> tuple[TorchBackend, str]:
    """Return the backend `torch`, on the first GPU by default.

    Raises:
        InvalidUsage: There is no such device.
        AiterPrepError: torch is not installed.
    """
    from aiter_prep.backends.torch_device import TorchBackend

    module = import_torch()
    device = device_of(module, wish.device)
    return TorchBackend(module, device, wish.device_memory), "asked for"


def use_aiter(wish: Wish) -> tuple[AiterBackend, str]:
    """Return the backend `aiter`, on the first GPU by default.

    Raises:
        InvalidUsage: There is no such device.
        AiterPrepError: torch or AITER is missing, or AITER brings other bytes than ours.
    """
    backend = _aiter_unproven(wish)
    return backend, _prove(backend, wish)


def use_best(wish: Wish) -> tuple[CpuBackend | TorchBackend | AiterBackend, str]:
    """Return the backend that suits this machine, and why it does.

    An AITER that is there but brings other bytes is no reason to do without it quietly: its
    kernels may want what it brings.

    Raises:
        InvalidUsage: There is no such device.
        AiterPrepError: AITER brings other bytes than ours.
    """
    if wish.device == CPU:
        return CpuBackend(), "device `cpu` was asked for"
    chips = ", ".join(dict.fromkeys(rocm.local_chips()))
    if chips:
        try:
            backend = _aiter_unproven(wish)
        except InvalidUsage:
            raise
        except AiterPrepError as fault:
            reason = f"this machine has {chips}, but {fault.message}"
        else:
            return backend, f"this machine has {chips}; {_prove(backend, wish)}"
    else:
        reason = "this machine has no GPU that the ROCm driver knows"
    if wish.device is None:
        return CpuBackend(), reason
    return use_torch(wish)[0], f"device `{printable(wish.device)}` was asked for; {reason}"


def import_torch() -> Any:
    """Import torch.

    Raises:
        AiterPrepError: It is not installed, or broken.
    """
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as fault:
        raise AiterPrepError(
            "torch is not installed",
            "install it (for an AMD GPU, ROCm's build of it), or convert with --backend cpu, which "
            "needs none",
        ) from fault
    except (ImportError, OSError) as fault:
        raise AiterPrepError(f"torch cannot be imported: {fault}", "use --backend cpu") from fault


def device_of(module: Any, name: str | None) -> Any:
    """Return a device of torch: the first GPU by default, or the CPU where there is none.

    Raises:
        InvalidUsage: There is no such device.
    """
    count = module.cuda.device_count() if module.cuda.is_available() else 0
    if name is None:
        return module.device("cuda:0" if count else CPU)
    try:
        device = module.device("cuda:0" if name == "cuda" else name)
    except RuntimeError:
        device = None
    if device is None or device.type not in {CPU, "cuda"}:
        raise InvalidUsage(
            f"device `{printable(name)}` is not known", "use cpu, or cuda:0, cuda:1, ..."
        )
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InvalidUsage(f"device `{printable(name)}` is not here: torch sees {count} GPUs")
    return device


def _aiter_unproven(wish: Wish) -> AiterBackend:
    from aiter_prep.backends.aiter_package import find_aiter
    from aiter_prep.backends.aiter_rocm import AiterBackend, functions_for

    module = import_torch()
    device = device_of(module, wish.device)
    if wish.device is None and device.type == CPU:
        raise AiterPrepError(
            "torch sees no GPU", "install ROCm's build of torch, or give --device cpu"
        )
    found = find_aiter()
    found.require(functions_for(_layouts(wish)))
    return AiterBackend(module, device, wish.device_memory, found)


def _prove(backend: AiterBackend, wish: Wish) -> str:
    """Hold AITER to our layouts; return what to say of it.

    Raises:
        AiterPrepError: It brings other bytes.
    """
    from aiter_prep.backends.probe import probe

    probed = probe(backend, _layouts(wish))
    probed.require()
    backend.fingerprint = probed.theirs
    version = backend.provenance["aiter_version"] or "of unknown version"
    return f"AITER {version} brings our bytes, fingerprint {probed.theirs}"


def _layouts(wish: Wish) -> tuple[str, ...]:
    return tuple(LAYOUTS) if wish.layouts is None else wish.layouts
