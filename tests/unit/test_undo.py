"""Undoing takes many experts at once, in the order in which every rank has stored them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prepared
from aiter_prep.demo import make_checkpoint
from aiter_prep.manifest import TensorRecord
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.undo import StackRecord
from aiter_prep.undo.matrices import _runs
from aiter_prep.undo.records import experts_of
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
