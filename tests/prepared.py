"""Prepares folders for tests, and forges them: changes bytes and makes every digest fit again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import xxhash

import tiny
from aiter_prep.execution import execute
from aiter_prep.manifest import Manifest
from aiter_prep.plan import Plan, make_plan
from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint
from aiter_prep.storage.header import TensorInfo
from aiter_prep.verification import Problem, verify

MANIFEST = "aiter_prep.json"
JOURNAL = ".aiter_prep.journal"
LOCK = ".aiter_prep.lock"


def plan_of(source: Path, tp: int = 1, **options: Any) -> Plan:
    """Open a checkpoint and plan its conversion."""
    return make_plan(open_checkpoint(source), tp=tp, **options)


def header_only(
    folder: Path, shapes: Mapping[str, tiny.Shape], config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Return a checkpoint that exists as names and shapes alone; `folder` is an empty one."""
    tensors: dict[str, TensorInfo] = {}
    at = 0
    for name, (dtype, shape) in shapes.items():
        size = prod(shape) * tiny.WIDTH[dtype]
        tensors[name] = TensorInfo(name, dtype, shape, "model.safetensors", at, size)
        at += size
    return Checkpoint(
        folder=folder,
        name="tiny",
        revision=None,
        config=config or {},
        hf_quant_config=None,
        headers=(),
        tensors=tensors,
    )


def prepare(source: Path, out: Path, tp: int = 1, *, workers: int = 1, **options: Any) -> Manifest:
    """Convert a checkpoint."""
    return execute(plan_of(source, tp, **options), out, workers=workers)


def problems_of(folder: Path, source: Path | None = None) -> tuple[Problem, ...]:
    """Return what `verify` finds, against a source if there is one."""
    checkpoint = None if source is None else open_checkpoint(source)
    return verify(folder, source=checkpoint).problems


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of every file below a folder, by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stamps(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return size, time of the last change and digest of every file, by its path."""
    return {
        name: (*_size_and_time(folder / name), digest) for name, digest in contents(folder).items()
    }


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


# --- forgery ------------------------------------------------------------------------------------


def digest(data: bytes, algorithm: str = "xxh3-128") -> str:
    """Return a digest as the format writes it, computed apart from the product."""
    return f"{algorithm}:{xxhash.xxh3_128(data).hexdigest()}"


def canonical(document: Any) -> bytes:
    """Return the canonical JSON of a document."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def load(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder, as JSON."""
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return found


def sealed(document: dict[str, Any]) -> bytes:
    """Return the text of a manifest whose self digest fits."""
    document = {key: value for key, value in document.items() if key != "self_digest"}
    document["self_digest"] = digest(canonical(document))
    return (json.dumps(document, sort_keys=True, indent=2) + "\n").encode()


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of a folder and make its self digest fit."""
    document = load(folder)
    change(document)
    (folder / MANIFEST).write_bytes(sealed(document))


def reseal(folder: Path) -> None:
    """Make every digest and size of a manifest fit the bytes that lie in the folder."""
    document = load(folder)
    records: dict[str, dict[str, dict[str, Any]]] = {}
    for record in document["tensors"]:
        records.setdefault(record["file"], {})[record["name"]] = record
    for shard in document["shards"]:
        _reseal_shard(folder, shard, records[shard["file"]])
    for file in document["files"]:
        data = (folder / file["name"]).read_bytes()
        file["size"], file["digest"] = len(data), digest(data)
    (folder / MANIFEST).write_bytes(sealed(document))


def _reseal_shard(folder: Path, shard: dict[str, Any], records: dict[str, dict[str, Any]]) -> None:
    raw = (folder / shard["file"]).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    lines = [digest(raw[:start])]
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        records[name]["digest"] = digest(raw[start + first : start + last])
        lines.append(records[name]["digest"])
    shard["size"] = len(raw)
    shard["header_digest"] = lines[0]
    shard["digest"] = digest("\n".join(lines).encode(), "xxh3-128-tree")


def spans(path: Path) -> dict[str, tuple[int, int]]:
    """Return the first byte and the byte after the last of every tensor of a shard."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in header.items()
    }


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def small(
    folder: Path, kind: str = "mxfp4_quark", tp: int = 2, **changes: Any
) -> tuple[Path, Path]:
    """Write a tiny checkpoint and its prepared folder; return both."""
    source = tiny.write(
        folder / "source", kind=kind, **{"hidden": 64, "intermediate": 64, **changes}
    )
    (source / "tokenizer.json").write_text('{"tiny": true}', "utf-8")
    prepare(source, folder / "out", tp)
    return source, folder / "out"
