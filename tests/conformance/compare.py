"""Compares a prepared folder with what the engine holds, byte for byte, outside its padding."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conformance.dump_format import Bytes, RankDump, TensorFacts, read_dump

MANIFEST = "aiter_prep.json"

_UNREAD = ("w13_weight_shape", "w2_weight_shape")
"""Tensors that the engine keeps and never reads again: a folder need not have them."""

_WIDTHS = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e8m0fnu": 1,
    "int32": 4,
    "int4": 1,
    "int8": 1,
    "uint32": 4,
    "uint8": 1,
}
"""Bytes of one element of each runtime dtype, packed ones counted as the engine counts them."""


@dataclass
class Comparison:
    """What a comparison found.

    Attributes:
        tensors: how many tensors of how many ranks were compared.
        bytes_equal: how many bytes were equal.
        bytes_masked: how many bytes were padding that the engine leaves to chance.
        differences: one line for each thing that differs; none means equal.
    """

    tensors: int = 0
    bytes_equal: int = 0
    bytes_masked: int = 0
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The counts, then the differences."""
        counts = (
            f"{self.tensors} tensors, {self.bytes_equal} bytes equal, {self.bytes_masked} masked"
        )
        return "\n".join([counts, *self.differences])


def engine_module(experts: str, modules: dict[str, Any]) -> str | None:
    """The engine's module of the source's `experts` path; names before the layer may differ.

    `layers.0.ffn.experts` of a source is `model.layers.0.ffn.experts.routed_experts` in the engine.
    """
    tail = experts[experts.index("layers.") :] + ".routed_experts"
    found = [name for name in modules if name == tail or name.endswith("." + tail)]
    return found[0] if len(found) == 1 else None


def engine_name(name: str, dump: RankDump) -> str | None:
    """The engine's name of our tensor `<experts>.<leaf>`.

    A folder says `weight_scale_inv` where the source does, the engine where its method does.
    """
    experts, _, leaf = name.rpartition(".")
    module = engine_module(experts, dump.modules)
    other = leaf.removesuffix("_inv") if leaf.endswith("_inv") else f"{leaf}_inv"
    names = (f"{module}.{leaf}", f"{module}.{other}")
    return next((found for found in names if found in dump.tensors), None)


def _stored_bytes(folder: Path, entry: dict[str, Any]) -> Bytes:
    """The bytes of one tensor, read by hand: no reader knows every dtype name."""
    with (folder / entry["file"]).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        begin, end = header[entry["name"]]["data_offsets"]
        file.seek(8 + size + begin)
        return np.frombuffer(file.read(end - begin), dtype=np.uint8)


def _facts_differ(entry: dict[str, Any], facts: TensorFacts) -> Iterator[str]:
    """Lines on shape, runtime dtype and flag; AITER never flags scales, whatever their order."""
    ours: dict[str, Any] = {
        "shape": tuple(entry["shape"]),
        "runtime dtype": entry["runtime_dtype"],
    }
    theirs: dict[str, Any] = {"shape": facts.shape, "runtime dtype": facts.runtime_dtype}
    if "scale" not in entry["name"].rpartition(".")[2]:
        ours["is_shuffled"], theirs["is_shuffled"] = entry["is_shuffled"], facts.is_shuffled
    for what, mine in ours.items():
        if mine != theirs[what]:
            yield f"{what} is {mine}, the engine has {theirs[what]}"


def _where(offset: int, facts: TensorFacts) -> str:
    """The indices of the element that holds the byte at `offset`."""
    index = offset // _WIDTHS.get(facts.runtime_dtype, 1)
    if not facts.shape or index >= math.prod(facts.shape):
        return f"byte {offset}"
    return f"byte {offset}, element {tuple(int(i) for i in np.unravel_index(index, facts.shape))}"


def compare_tensor(
    ours: Bytes, theirs: Bytes, mask: Bytes | None, facts: TensorFacts
) -> tuple[int, int, str]:
    """Counts of equal and of masked bytes, and a line that says where they differ, or nothing."""
    if ours.size != theirs.size:
        return 0, 0, f"{ours.size} bytes, the engine has {theirs.size}"
    masked = np.zeros(ours.size, dtype=bool) if mask is None else mask.astype(bool)
    wrong = (ours != theirs) & ~masked
    equal = int((~wrong & ~masked).sum())
    if not wrong.any():
        return equal, int(masked.sum()), ""
    first = int(np.argmax(wrong))
    line = (
        f"{int(wrong.sum())} of {ours.size} bytes differ, the first at {_where(first, facts)}: "
        f"0x{int(ours[first]):02X}, the engine has 0x{int(theirs[first]):02X}"
    )
    return equal, int(masked.sum()), line


def _compare_rank(folder: Path, entries: list[dict[str, Any]], dump: RankDump) -> Comparison:
    result = Comparison()
    rank = dump.run["rank"]
    missing = {name for name in dump.tensors if not name.endswith(_UNREAD)}
    for entry in entries:
        name = engine_name(entry["name"], dump)
        if name is None:
            result.differences.append(f"rank {rank}: the engine has no `{entry['name']}`")
            continue
        missing.discard(name)
        facts = dump.tensors[name]
        lines = list(_facts_differ(entry, facts))
        ours = _stored_bytes(folder, entry)
        equal, masked, line = compare_tensor(ours, dump.data[name], dump.masks.get(name), facts)
        lines += [line] if line else []
        result.tensors += 1
        result.bytes_equal += equal
        result.bytes_masked += masked
        result.differences += [f"rank {rank}: `{entry['name']}`: {line}" for line in lines]
    result.differences += [f"rank {rank}: not prepared: `{name}`" for name in sorted(missing)]
    return result


def compare(folder: Path, dump_files: list[Path]) -> Comparison:
    """Compares all ranks of the prepared `folder` with the dumps, one file a rank."""
    manifest = json.loads((folder / MANIFEST).read_text())
    total = Comparison()
    for path in dump_files:
        dump = read_dump(path)
        entries = [e for e in manifest["tensors"] if e["rank"] == dump.run["rank"]]
        found = _compare_rank(folder, entries, dump)
        total.tensors += found.tensors
        total.bytes_equal += found.bytes_equal
        total.bytes_masked += found.bytes_masked
        total.differences += found.differences
    return total
