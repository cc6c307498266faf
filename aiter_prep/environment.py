"""What a bug report needs to know about the machine and the packages on it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep._version import __version__
from aiter_prep.backends import rocm

if TYPE_CHECKING:
    from collections.abc import Mapping

REQUIRED = ("numpy", "safetensors", "huggingface_hub", "xxhash", "typer", "rich")
OPTIONAL = ("vllm", "sglang", "transformers")

_ROCM_VERSION = Path("/opt/rocm/.info/version")
_SHUFFLE_WEIGHT = re.compile(r"^def shuffle_weight\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Environment:
    """What is installed here.

    Attributes:
        aiter_prep: Our own version.
        python: Version and implementation of Python.
        platform: Operating system and machine.
        packages: Package to version, or None where it is not installed.
        torch: What torch says of itself, or why it says nothing.
        aiter: What was found under the name `aiter`.
        rocm: Version of ROCm, or None.
        chips: gfx names of the GPUs that the kernel's driver knows.
    """

    aiter_prep: str
    python: str
    platform: str
    packages: Mapping[str, str | None]
    torch: Mapping[str, Any]
    aiter: Mapping[str, Any]
    rocm: str | None
    chips: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what it says as plain values."""
        return asdict(self)


def look_around() -> Environment:
    """Collect versions; whatever is missing or broken is said, never raised."""
    return Environment(
        aiter_prep=__version__,
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        platform=platform.platform(),
        packages={name: _version_of(name) for name in (*REQUIRED, *OPTIONAL)},
        torch=_torch(),
        aiter=_aiter(),
        rocm=_first_line(_ROCM_VERSION),
        chips=rocm.local_chips(),
    )


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except Exception:  # noqa: BLE001 - broken metadata is as good as none
        return None


def _torch() -> dict[str, Any]:
    """Ask torch for its version, its backend and its devices."""
    if not _is_there("torch"):
        return {"version": None}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # stdout is for our result
            torch = importlib.import_module("torch")
            return {
                "version": str(torch.__version__),
                "hip": _text_or_none(torch.version.hip),
                "cuda": _text_or_none(torch.version.cuda),
                "devices": _devices(torch),
            }
    except (Exception, SystemExit) as fault:  # noqa: BLE001 - a broken torch is what we report
        return {"version": _version_of("torch"), "fault": _reason(fault)}


def _devices(torch: Any) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found: list[dict[str, Any]] = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        arch = getattr(properties, "gcnArchName", None)
        found.append(
            {
                "name": str(properties.name),
                "gfx": str(arch).partition(":")[0] if arch else None,
                "total_bytes": int(properties.total_memory),
            }
        )
    return found


def _aiter() -> dict[str, Any]:
    """Look for AITER by one of its functions, without importing it: that may start a compiler.

    PyPI has a package named `aiter`, too: an asynchronous-iterator library that has nothing to
    do with AMD's.
    """
    try:
        spec = importlib.util.find_spec("aiter")
    except Exception as fault:  # noqa: BLE001 - a broken package is what we report
        return {"kind": "broken", "fault": _reason(fault)}
    if spec is None:
        return {"kind": "missing"}
    for folder in spec.submodule_search_locations or ():
        if _SHUFFLE_WEIGHT.search(_text(Path(folder) / "ops" / "shuffle.py") or ""):
            version = _version_of("amd-aiter") or _version_of("aiter")
            return {"kind": "aiter", "version": version, "folder": str(folder)}
    return {"kind": "another package", "version": _version_of("aiter"), "folder": spec.origin}


def _is_there(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # noqa: BLE001 - broken is not there
        return False


def _reason(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}"


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _first_line(path: Path) -> str | None:
    text = _text(path)
    return text.strip().partition("\n")[0] if text else None
