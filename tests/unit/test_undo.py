"""Undoing takes many experts at once, in the order in which every rank has stored them."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prepared
import tiny
from aiter_prep.demo import make_checkpoint
from aiter_prep.errors import DataMismatch
from aiter_prep.manifest import Lost, SourceSlice, TensorRecord
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.undo import DamagedTensor, StackRecord
from aiter_prep.undo.matrices import _runs
from aiter_prep.undo.records import experts_of
from aiter_prep.undo.slices import source_part
from aiter_prep.verification import verify


def record_of(rank: int, experts: range) -> TensorRecord:
    held = (experts.start, experts.stop, experts.step)
    return TensorRecord(
        name="w", rank=rank, file="f", dtype="U8", runtime_dtype=None, shape=(), logical_shape=(),
        layout=None, is_shuffled=False, merge=None, packing=None, experts=held, matrix=None,
        form=None, pads=(), fill="00", lost=None, source=(), digest="",
    )  # fmt: skip


RANGES = st.builds(
    lambda start, count, step: range(start, start + count * step, step),
    st.integers(0, 6),
    st.integers(1, 9),
    st.integers(1, 4),
)


@given(st.lists(RANGES, min_size=1, max_size=5))
def test_runs_hold_every_expert_of_every_rank_in_stored_order(held: list[range]) -> None:
    records = tuple(record_of(rank, experts) for rank, experts in enumerate(held))
    seen: dict[int | None, list[int]] = defaultdict(list)
    for holders, experts in _runs(StackRecord("w", records)):
        assert [r.rank for r in holders] == [r for r, has in enumerate(held) if experts[0] in has]
        for record in holders:
            indices = [experts_of(record).index(expert) for expert in experts]
            assert indices == [*range(indices[0], indices[0] + len(experts))]
            seen[record.rank] += experts
    assert seen == {rank: [*experts] for rank, experts in enumerate(held)}


@pytest.mark.parametrize(
    ("held", "count"),
    [
        ([range(8), range(8)], 1),
        ([range(4), range(4, 8)], 2),
        ([range(0, 8, 2), range(1, 8, 2)], 2),  # placed in turn
    ],
)
def test_ranks_that_hold_the_same_experts_make_one_run(held: list[range], count: int) -> None:
    records = tuple(record_of(rank, experts) for rank, experts in enumerate(held))
    assert len([*_runs(StackRecord("w", records))]) == count


def test_comparing_with_the_source_reads_every_byte_of_the_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make_checkpoint(source)
    manifest = prepared.prepare(source, out, 2)
    read: dict[str, int] = defaultdict(int)
    preadv = os.preadv

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        read[Path(f"/proc/self/fd/{descriptor}").readlink().name] += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    report = verify(out, source=open_checkpoint(source), workers=1)
    assert report.is_clean
    data = {shard.file: 0 for shard in manifest.shards}
    for record in prepared.load(out)["tensors"]:
        info = prepared.spans(out / record["file"])[record["name"]]
        data[record["file"]] += info[1] - info[0]
    assert {name: read[name] for name in data} == data


def test_bytes_that_no_conversion_makes_are_found_though_every_digest_fits(tmp_path: Path) -> None:
    """BF16 scales in F32 have 16 bits that the inverse throws away."""
    model = tiny.Model("fp8_block_bf16", hidden=128, intermediate=128, layers=1)
    source = tiny.write(tmp_path / "source", model)
    out = tmp_path / "out"
    prepared.prepare(source, out, 1, target="vllm@0.33", gfx="gfx942")
    assert prepared.problems_of(out, source) == ()
    scales = [
        (out / record["file"], record["name"])
        for record in prepared.load(out)["tensors"]
        if record["source"] and record["source"][0]["conversion"] == "bf16_to_f32_times_2"
    ]
    assert scales
    for path, name in scales:
        start, _ = prepared.spans(path)[name]
        for byte in (start, start + 1):
            prepared.flip(path, byte, 3)
            prepared.reseal(out)
            assert name in {problem.tensor for problem in prepared.problems_of(out, source)}
            with pytest.raises(DataMismatch, match="bf16_to_f32_times_2 makes of no source"):
                restore(out, tmp_path / "back")
            prepared.flip(path, byte, 3)
    prepared.reseal(out)
    assert prepared.problems_of(out, source) == ()


FP8_LOSS = Lost(source=0x80, stored=0x00, count=1, positions=(5,))


@pytest.mark.parametrize("byte", [0x80, 0x7E, 0x01, 0xFF])
def test_a_lost_byte_comes_back_only_from_what_it_became(byte: int) -> None:
    item = SourceSlice("w.{expert}", "F8_E4M3", (2, 4), False, None, (0, 2, 1), (0, 4), 4, False,
                       "e4m3fn_to_e4m3fnuz", 0)  # fmt: skip
    record = dataclasses.replace(
        record_of(0, range(1)), matrix=(2, 4, 4), source=(item,), lost=FP8_LOSS
    )
    matrices = np.arange(8, dtype=np.uint8).reshape(1, 2, 4)
    matrices[0, 1, 1] = 0x00
    assert source_part(record, item, matrices, 0)[0, 1, 1] == 0x80
    matrices[0, 1, 1] = byte
    with pytest.raises(DamagedTensor, match="e4m3fn_to_e4m3fnuz makes of no source"):
        source_part(record, item, matrices, 0)


def test_of_ranks_that_disagree_the_damaged_one_is_named(tmp_path: Path) -> None:
    """Scales that are not cut lie on every rank."""
    model = tiny.Model("fp8_channel_1d", hidden=64, intermediate=64, layers=1)
    source = tiny.write(tmp_path / "source", model)
    out = tmp_path / "out"
    prepared.prepare(source, out, 2)
    for rank in (0, 1):
        path = out / f"model-rank-{rank}-part-0.safetensors"
        (name,) = [name for name in prepared.spans(path) if name.endswith("w2_weight_scale")]
        prepared.flip(path, prepared.spans(path)[name][0])
        problems = prepared.problems_of(out, source)
        assert {(problem.rank, problem.tensor) for problem in problems} == {(rank, name)}
        prepared.flip(path, prepared.spans(path)[name][0])
