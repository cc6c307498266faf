"""What a person types to use a prepared folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.storage.shell import command_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LOADER = "vllm"  # the only engine with a loader of ours


def serving_lines(target: Mapping[str, Any], folder: str, *, runs_python: bool = True) -> list[str]:
    """Return what serves a prepared folder: lines of shell, or of Python for plain torch.

    Args:
        target: `target` of its manifest.
        folder: What the folder is called.
        runs_python: Return the lines of Python where no engine has a loader; else none.
    """
    if target["engine"] == LOADER:
        words: list[str | Path] = ["vllm", "serve", Path(folder), "--load-format", "aiter_prep"]
        words += ["--tensor-parallel-size", str(max(target["tp"], target["ep"]))]
        if target["ep"] != 1:
            words.append("--enable-expert-parallel")
        if target["ep"] != 1 and target["placement"] != "linear":
            words += ["--expert-placement-strategy", str(target["placement"])]
        return [f"VLLM_ROCM_USE_AITER=1 {command_line(*words)}"]
    if not runs_python:
        return []
    return ["import aiter_prep", f"tensors = aiter_prep.load({folder!r}, rank=0)"]


def needs(target: Mapping[str, Any]) -> str:
    """Return what has to be installed to serve a prepared folder, as a sentence."""
    if target["engine"] == LOADER:
        return "It takes vLLM and aiter-prep beside it: `pip install aiter-prep[vllm]` brings both."
    if target["engine"] == "aiter":
        return "It takes torch and aiter-prep; the tensors are those that AITER's kernels want."
    return (
        f"There is no loader for {target['engine']} yet: the tensors can be read into plain torch, "
        "rank by rank."
    )


def sharing_words(target: Mapping[str, Any]) -> str:
    """Return how the ranks share the experts: `8 tensor-parallel ranks`."""
    kind, number = ("tensor", target["tp"]) if target["ep"] == 1 else ("expert", target["ep"])
    ranks = f"{number} {kind}-parallel rank{'' if number == 1 else 's'}"
    placed = f", {target['placement']}" if target["ep"] != 1 else ""
    held = len(target["ranks"])
    return f"{ranks}{placed}" + ("" if held == number else f", of which it holds {held}")
