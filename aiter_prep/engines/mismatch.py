"""The refusal to serve a prepared folder that does not fit what runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiter_prep.manifest import Manifest

_OPTION_FLAGS = {
    "gate_up": "--gate-up",
    "activation_dtype": "--activation-dtype",
    "moe_backend": "--moe-backend",
}


class EngineMismatch(AiterPrepError):
    """A prepared folder and the engine that would serve it contradict each other.

    Engines print exceptions as they are, so the text of this one has its hint, too.
    """

    def __str__(self) -> str:
        """Return the message and the hint."""
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


def convert_command(
    manifest: Manifest, options: Mapping[str, str] | None = None, **changes: object
) -> str:
    """Return the command that would have prepared a folder in another way.

    Args:
        manifest: The manifest of the folder.
        options: What is to be chosen between paths of the target, instead of what was.
        changes: What is to be other than it is, by key of `Manifest.target`.
    """
    target = {**manifest.target, **changes}
    words = ["aiter-prep convert", str(manifest.source["name"]), "OUT"]
    words += [f"--target {target['name']}", f"--gfx {target['gfx']}"]
    words.append(f"--ep {target['ep']}" if target["ep"] != 1 else f"--tp {target['tp']}")
    if target["placement"] != "linear" and target["ep"] != 1:
        words.append(f"--placement {target['placement']}")
    chosen = manifest.options.get("engine", {}) if options is None else options
    words += [f"{_OPTION_FLAGS[name]} {value}" for name, value in chosen.items()]
    if manifest.options.get("fuse_shared_experts"):
        words.append("--fuse-shared-experts")
    return f"`{' '.join(words)}`"
