"""The comparison itself: what it must find, and what it must overlook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.checkpoint_values import RawTensor, save_tensors
from conformance.compare import MANIFEST, Comparison, compare
from conformance.dump_format import (
    ModuleFacts,
    RankDump,
    TensorFacts,
    dump_path,
    read_dump,
    write_dump,
)

OURS = "layers.0.ffn.experts.w2_weight"
MODULE = "model.layers.0.ffn.experts.routed_experts"
SHARD = "model-rank-0-part-0.safetensors"
VALUES = np.arange(8, dtype=np.uint8)


def held(masked: tuple[int, ...] = (), **more: Any) -> RankDump:
    facts = {"runtime_dtype": "uint8", "shape": (2, 4), "stride": (4, 1), "kind": "parameter"}
    name = f"{MODULE}.w2_weight"
    mask = np.isin(VALUES, masked).astype(np.uint8)
    return RankDump(
        run={"rank": 0},
        modules={MODULE: ModuleFacts("Method", "AITER", None, (4, 4), (2, 2), 1)},
        tensors={name: TensorFacts(**{**facts, "is_shuffled": True, **more})},
        data={name: VALUES},
        masks={name: mask} if masked else {},
    )


def prepared(folder: Path, values: bytes, **more: Any) -> Path:
    save_tensors(folder / SHARD, {OURS: RawTensor("U8", (2, 4), values)})
    entry = {"name": OURS, "rank": 0, "file": SHARD, "shape": [2, 4]}
    entry |= {"runtime_dtype": "uint8", "is_shuffled": True, **more}
    (folder / MANIFEST).write_text(json.dumps({"tensors": [entry]}))
    return folder


def compared(tmp_path: Path, dump: RankDump, values: bytes, **more: Any) -> Comparison:
    write_dump(dump, dump_path(tmp_path, 0))
    return compare(prepared(tmp_path, values, **more), [dump_path(tmp_path, 0)])


def test_a_dump_reads_back_as_it_was_written(tmp_path: Path) -> None:
    dump = held((3,))
    write_dump(dump, dump_path(tmp_path, 0))
    again = read_dump(dump_path(tmp_path, 0))
    assert (again.run, again.modules, again.tensors) == (dump.run, dump.modules, dump.tensors)
    for mine, read in ((dump.data, again.data), (dump.masks, again.masks)):
        assert {k: v.tolist() for k, v in mine.items()} == {k: v.tolist() for k, v in read.items()}


def test_equal_bytes_are_equal(tmp_path: Path) -> None:
    result = compared(tmp_path, held(), VALUES.tobytes())
    assert (result.tensors, result.bytes_equal, result.differences) == (1, 8, [])


def test_one_different_byte_is_found_and_told(tmp_path: Path) -> None:
    result = compared(tmp_path, held(), bytes([0, 1, 2, 3, 4, 9, 6, 7]))
    where = "1 of 8 bytes differ, the first at byte 5, element (1, 1)"
    assert result.differences == [f"rank 0: `{OURS}`: {where}: 0x09, the engine has 0x05"]


def test_uninitialised_padding_may_hold_anything(tmp_path: Path) -> None:
    result = compared(tmp_path, held((5, 6)), bytes([0, 1, 2, 3, 4, 0, 0, 7]))
    assert (result.bytes_equal, result.bytes_masked, result.differences) == (6, 2, [])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"shape": [8]}, "shape is (8,), the engine has (2, 4)"),
        ({"runtime_dtype": "int8"}, "runtime dtype is int8, the engine has uint8"),
        ({"is_shuffled": False}, "is_shuffled is False, the engine has True"),
    ],
)
def test_facts_are_compared_too(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    result = compared(tmp_path, held(), VALUES.tobytes(), **more)
    assert result.differences == [f"rank 0: `{OURS}`: {said}"]


def test_a_tensor_that_is_not_prepared_is_told(tmp_path: Path) -> None:
    write_dump(held(), dump_path(tmp_path, 0))
    (tmp_path / MANIFEST).write_text(json.dumps({"tensors": []}))
    result = compare(tmp_path, [dump_path(tmp_path, 0)])
    assert result.differences == [f"rank 0: not prepared: `{MODULE}.w2_weight`"]
