"""Finds AMD's AITER by its functions, not by its name."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_SHUFFLE = "aiter.ops.shuffle"
HOMES: dict[str, str] = {
    "shuffle_weight": _SHUFFLE,
    "shuffle_weight_a16w4": _SHUFFLE,
    "shuffle_scale_a16w4": _SHUFFLE,
    "shuffle_scale_n32k4": _SHUFFLE,
    "shuffle_scale_for_int4": _SHUFFLE,
    "interleave_gate_up_rows": _SHUFFLE,
    "e8m0_shuffle": "aiter.utility.fp4_utils",
}
INSTALL = (
    "install AMD's AITER: the package `amd-aiter`, or github.com/ROCm/aiter from source; the "
    "`aiter` of PyPI is an asynchronous-iterator library that has nothing to do with it"
)
_LOCAL_COMMIT = re.compile(r"\+g?([0-9a-f]{7,40})\b")


@dataclass(frozen=True, slots=True)
class Aiter:
    """AMD's AITER, as it is installed here.

    Attributes:
        functions: Those of `HOMES` that it has.
        version: Its version, if it says one.
        commit: The commit that it was built from, if it says one.
        folder: Where it lies.
    """

    functions: Mapping[str, Callable[..., Any]]
    version: str | None
    commit: str | None
    folder: str

    def require(self, names: Iterable[str]) -> None:
        """Check that it has some functions.

        Raises:
            AiterPrepError: It lacks one.
        """
        missing = sorted(set(names) - self.functions.keys())
        if missing:
            raise AiterPrepError(
                f"AITER {self.version or ''} in `{self.folder}` has no `{HOMES[missing[0]]}."
                f"{missing[0]}`".replace("  ", " "),
                "use a newer AITER, or convert with --backend cpu",
            )


def find_aiter() -> Aiter:
    """Import AITER.

    Raises:
        AiterPrepError: It is not installed, is another package, or cannot be imported.
    """
    package = _package()
    functions = functions_of({home: _module(home) for home in dict.fromkeys(HOMES.values())})
    folder = str((getattr(package, "__path__", None) or ["?"])[0])
    if not functions:
        raise AiterPrepError(_not_aiter(package), INSTALL)
    version = _version(package)
    return Aiter(functions, version, _commit(version), folder)


def functions_of(modules: Mapping[str, ModuleType | None]) -> dict[str, Callable[..., Any]]:
    """Return the functions of `HOMES` that some modules, by their names, hold."""
    return {
        name: function
        for name, home in HOMES.items()
        if callable(function := getattr(modules[home], name, None))
    }


def _package() -> ModuleType:
    if "aiter" not in sys.modules and importlib.util.find_spec("aiter") is None:
        raise AiterPrepError("AITER is not installed", INSTALL)
    package = _module("aiter")
    if package is None:
        raise AiterPrepError("AITER is not installed", INSTALL)
    return package


def _module(name: str) -> ModuleType | None:
    """Import a module, or return None where the package has no such module.

    Raises:
        AiterPrepError: It is there, but cannot be imported.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # AITER's compiler speaks while it is imported
            return importlib.import_module(name)
    except ModuleNotFoundError as fault:
        if fault.name is not None and (name == fault.name or name.startswith(f"{fault.name}.")):
            return None
        raise _broken(name, fault) from fault
    except (Exception, SystemExit) as fault:
        raise _broken(name, fault) from fault


def _broken(name: str, fault: BaseException) -> AiterPrepError:
    reason = f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0]}"
    return AiterPrepError(
        f"`{name}` cannot be imported: {reason}", "mend it, or convert with --backend cpu"
    )


def _not_aiter(package: ModuleType) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return (
            f"the `aiter` {importlib.metadata.version('aiter')} here is another package: it has no "
            f"`{_SHUFFLE}.shuffle_weight`"
        )
    return f"the `aiter` in `{package.__file__}` has no `{_SHUFFLE}.shuffle_weight`"


def _version(package: ModuleType) -> str | None:
    said = getattr(package, "__version__", None) or getattr(_optional_version(), "version", None)
    if isinstance(said, str):
        return said
    for name in ("amd-aiter", "aiter"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _optional_version() -> ModuleType | None:
    with contextlib.suppress(AiterPrepError):
        return _module("aiter._version")
    return None


def _commit(version: str | None) -> str | None:
    """Return the commit that setuptools or pip wrote down, or the one in the version's name."""
    module = _optional_version()
    said = getattr(module, "__commit_id__", None) or getattr(module, "commit_id", None)
    if isinstance(said, str):
        return said.removeprefix("g")
    for name in ("amd-aiter", "aiter"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            origin = importlib.metadata.distribution(name).read_text("direct_url.json")
            commit = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
            if commit:
                return str(commit)
    match = _LOCAL_COMMIT.search(version or "")
    return match[1] if match else None
