"""The names that a prepared folder may hold."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from aiter_prep.storage.checkpoint import (
    MANIFEST_FILE,
    PICKLES,
    is_plain_name,
    refuse_link_outside,
)

if TYPE_CHECKING:
    from pathlib import Path

JOURNAL_FILE = ".aiter_prep.journal"
LOCK_FILE = ".aiter_prep.lock"
PARTS_FOLDER = ".aiter_prep.parts"
PARTIAL_SUFFIX = ".partial"
HUB_FILES = frozenset({".cache", ".gitattributes"})  # beside what was downloaded from the Hub

SHARD_NAME = re.compile(r"model-(?:rank-(?:0|[1-9]\d*)|common)-part-(?:0|[1-9]\d*)\.safetensors")

MAX_SMALL_FILE_BYTES = 100_000_000

# weights in other formats, and indexes of weights; the tensors are ours to write
_WEIGHT_PATTERNS = (
    *PICKLES,
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin.index.json",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.npz",
    "*.tar*",
    "*.zip",
)


def shard_file(rank: int | None, part: int) -> str:
    """Return the name of a shard: of one rank, or of the common tensors (None)."""
    owner = "common" if rank is None else f"rank-{rank}"
    return f"model-{owner}-part-{part}.safetensors"


def partial_file(file: str) -> str:
    """Return the temporary name of a file that is being written."""
    return f".{file}{PARTIAL_SUFFIX}"


def is_weights_name(name: str) -> bool:
    """Return whether a file of this name holds weights, or says where they are."""
    return any(fnmatchcase(name, pattern) for pattern in _WEIGHT_PATTERNS)


def small_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files to copy from a source, and those that are left out.

    Tokenizer, chat template, code and the like are copied; weights in any format, hidden files,
    folders, pipes, files over `MAX_SMALL_FILE_BYTES` and names that a terminal could not bear are
    not. `config.json` is in neither list.

    Raises:
        BadSource: A file to copy is a link that leads out of the folder.
    """
    copied: list[str] = []
    left: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in ("config.json", MANIFEST_FILE):
            continue
        if is_weights_name(path.name) and path.is_file():
            continue
        is_small = path.is_file() and path.stat().st_size <= MAX_SMALL_FILE_BYTES
        if is_small and is_plain_name(path.name):
            refuse_link_outside(path)
            copied.append(path.name)
        else:
            left.append(path.name)
    return copied, left
