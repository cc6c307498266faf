"""A plan decides every byte's place: it proves that nothing is lost, and refuses what cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from aiter_prep.errors import AiterPrepError, BadSource, InvalidUsage, NoRule
from aiter_prep.layouts.table import LAYOUTS
from aiter_prep.plan import Piece, Plan, Source, Stack, Step, make_plan
from aiter_prep.plan.cut import workable_tp
from aiter_prep.plan.shards import Shard
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.targets.model import Alignment, align_to
from aiter_prep.targets.table import TARGETS, target_named
from prepared import header_only, plan_of, prepare

EXPERTS = "model.layers.0.mlp.experts"
# Sizes of which the intermediate size per rank must be a multiple, and the hidden size.
UNITS = {
    "bf16": (1, 32),
    "f16": (1, 32),
    "fp8_block_f32": (128, 128),
    "fp8_block_bf16": (128, 128),
    "fp8_channel_1d": (32, 32),
    "fp8_channel_n1": (32, 32),
    "mxfp4_quark": (32, 32),
    "mxfp4_ct": (32, 32),
    "mxfp4_v4": (32, 32),
    "mxfp8": (32, 32),
    "mxfp4_gpt_oss": (32, 32),
}


def plan_for(
    folder: Path, model: tiny.Model, tp: int = 1, shapes: Any = None, **options: Any
) -> Plan:
    """Plan a model that exists as names and shapes alone."""
    shapes = tiny.shapes_of(model) if shapes is None else shapes
    return make_plan(header_only(folder, shapes, tiny.config_of(model)), tp=tp, **options)


def refusal(
    folder: Path,
    model: tiny.Model,
    tp: int = 1,
    kind: type[AiterPrepError] = NoRule,
    **options: Any,
) -> AiterPrepError:
    with pytest.raises(kind) as caught:
        plan_for(folder, model, tp, **options)
    fault: AiterPrepError = caught.value
    assert type(fault) is kind
    assert (fault.message + fault.hint).isprintable()
    return fault


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing."""
    return tmp_path_factory.mktemp("empty")


# --- every byte once ----------------------------------------------------------------------------


def stacks_of(plan: Plan) -> Iterator[Stack]:
    return chain.from_iterable(block.stacks for block in plan.blocks)


def coverage(stack: Stack, number: int, source: Source) -> npt.NDArray[np.int64]:
    """Return how often each byte of an expert's source matrix is taken, over all ranks."""
    taken = np.zeros((source.rows, source.row_bytes), np.int64)
    for step in stack.steps:
        for piece in step.pieces:
            if piece.source == number:
                rows = slice(piece.rows.start, piece.rows.stop, piece.rows.step)
                taken[rows, piece.columns.start : piece.columns.stop] += 1
    return taken


def check_every_byte_is_taken_once(plan: Plan) -> None:
    held: set[str] = set()
    for block in plan.blocks:
        for stack in block.stacks:
            # scales of w2 per channel are not sliced, and those per tensor nowhere
            whole = stack.role == "weight_scale" and (
                block.block.scheme.name == "fp8_tensor"
                or (block.block.scheme.name == "fp8_channel" and stack.group == "w2")
            )
            for number, source in enumerate(stack.sources):
                held |= {tensor.name for tensor in source.tensors}
                taken = coverage(stack, number, source)
                assert (taken == (plan.tp if whole else 1)).all(), (stack.name, number)
    assert not held & {tensor.name for tensor in plan.common}
    assert held | {tensor.name for tensor in plan.common} == plan.checkpoint.tensors.keys()


def stored_width(stack: Stack, piece: Piece) -> int:
    """Return how many bytes of a stored row a piece fills."""
    conversion = stack.sources[piece.source].conversion
    if conversion is None:
        return len(piece.columns)
    return len(piece.columns) // conversion.source_bytes * conversion.stored_bytes


def check_pieces_fit_and_lie_apart(plan: Plan) -> None:
    for stack in stacks_of(plan):
        for step in stack.steps:
            place = np.zeros((stack.rows, stack.row_bytes), np.int64)
            for piece in step.pieces:
                columns = stored_width(stack, piece)
                assert piece.to_row + len(piece.rows) <= stack.rows
                assert columns <= stack.filled_row_bytes <= stack.row_bytes
                place[piece.to_row : piece.to_row + len(piece.rows), :columns] += 1
            assert place.max(initial=0) <= 1
            check_shapes(stack, step, int(place.sum()))


def check_shapes(stack: Stack, step: Step, filled: int) -> None:
    experts, width = len(step.experts), tiny.WIDTH[stack.dtype]
    size = prod(step.shape) * width
    if stack.form.shape == "folded":
        rows = -(-experts * stack.rows // stack.layout.row_pad) * stack.layout.row_pad
        assert step.shape == (rows, stack.row_bytes)
    else:
        assert size == experts * stack.rows * stack.row_bytes
        assert step.shape[0] == experts
    logical = prod(step.logical_shape) * width
    assert logical >= experts * filled  # more where a rank holds no part of a bias
    assert logical <= size


@st.composite
def models(draw: st.DrawFn) -> tuple[tiny.Model, int, str]:
    """Draw a model of any scheme and size, and a tensor-parallel size that works for it."""
    kind = draw(st.sampled_from(tiny.CONVERTIBLE))
    per_rank, hidden = UNITS[kind]
    tp = draw(st.integers(1, 9))
    if kind == "mxfp4_gpt_oss":
        intermediate = 32 * draw(st.integers(1, 12))
    else:
        intermediate = tp * per_rank * draw(st.integers(1, 40 if per_rank == 1 else 4))
    model = tiny.Model(
        kind,
        experts=draw(st.integers(1, 3)),
        hidden=hidden * draw(st.integers(1, 5)),
        intermediate=intermediate,
        biases=draw(st.booleans()),
    )
    return model, tp, draw(st.sampled_from(["gfx950", "gfx942"]))


@settings(max_examples=120)
@given(models())
def test_every_source_byte_is_taken_exactly_once_and_every_target_byte_written_once(
    empty: Path, drawn: tuple[tiny.Model, int, str]
) -> None:
    model, tp, gfx = drawn
    plan = plan_for(empty, model, tp, gfx=gfx)
    check_every_byte_is_taken_once(plan)
    check_pieces_fit_and_lie_apart(plan)


@pytest.mark.parametrize("kind", tiny.CONVERTIBLE)
@settings(max_examples=25)
@given(data=st.data())
def test_a_plan_is_made_or_the_size_is_refused_and_nothing_else(
    empty: Path, kind: str, data: st.DataObject
) -> None:
    """Whatever the sizes: a plan that proves itself, or a refusal that lists what works."""
    block = 1 if kind in {"bf16", "f16"} or kind.startswith("fp8") else 32
    model = tiny.Model(
        kind,
        experts=1,
        hidden=data.draw(st.sampled_from([32, 64, 96, 100, 128, 160, 256])) // block * block,
        intermediate=data.draw(st.integers(1, 20)) * max(block, data.draw(st.sampled_from([1, 8]))),
    )
    tp = data.draw(st.integers(1, 17))
    try:
        plan = plan_for(empty, model, tp)
    except NoRule as fault:
        works = [int(word.strip(",")) for word in fault.hint.split() if word[0].isdigit()]
        assert tp not in works
        for size in works[:4]:
            plan_for(empty, model, size)
    else:
        check_every_byte_is_taken_once(plan)
        check_pieces_fit_and_lie_apart(plan)


@pytest.mark.parametrize("layers", [1, 3])
def test_every_tensor_is_prepared_common_or_skipped(layers: int, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", layers=layers, spread="layers")
    index = json.loads((folder / tiny.INDEX).read_text("utf-8"))
    del index["weight_map"]["model.norm.weight"]
    (folder / tiny.INDEX).write_text(json.dumps(index), "utf-8")
    plan = plan_of(folder)
    assert plan.skipped == (("model.norm.weight", "in a shard, but not named by the index"),)
    names = {
        *(tensor.name for tensor in plan.common),
        *(t.name for stack in stacks_of(plan) for source in stack.sources for t in source.tensors),
        *(name for name, _ in plan.skipped),
    }
    assert names == {
        name for path in folder.glob("*.safetensors") for name in tiny.read_shard(path)
    }
    assert any("1 tensors that the index does not name" in text for text in plan.warnings)


# --- padding: vllm issue 43865 ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "intermediate", "tp", "padded"),
    [
        ("mxfp4_quark", 1536, 8, 256),
        ("mxfp4_quark", 2880 // 32 * 32, 3, 1024),
        ("mxfp4_ct", 192, 6, 256),
        ("mxfp4_v4", 2048, 64, 256),
        ("bf16", 768, 8, 128),
        ("bf16", 320, 8, 64),
        ("bf16", 1600, 8, 256),
        ("bf16", 192, 1, 192),
        ("bf16", 193 * 2, 2, 256),
    ],
)
def test_a_rank_takes_its_share_of_the_checkpoints_size_and_not_of_the_padded_one(
    kind: str, intermediate: int, tp: int, padded: int, empty: Path
) -> None:
    model = tiny.Model(kind, hidden=256, intermediate=intermediate, experts=1)
    plan = plan_for(empty, model, tp)
    (block,) = plan.blocks
    share = intermediate // tp
    assert block.cut.intermediate == padded
    w13, w2 = (
        next(s for s in block.stacks if s.name.endswith(f".{n}_weight")) for n in ("w13", "w2")
    )
    width = w2.sources[0].row_bytes * share // intermediate
    for rank in range(tp):
        rows = range(rank * share, (rank + 1) * share)
        gate, up = w13.steps[rank].pieces
        assert (gate.rows, gate.to_row) == (rows, 0)
        assert (up.rows, up.to_row) == (rows, padded)  # not `share`: at the padded size
        (down,) = w2.steps[rank].pieces
        assert (down.columns, down.to_row) == (range(rank * width, (rank + 1) * width), 0)
    assert w13.rows == 2 * padded


@pytest.mark.parametrize(
    ("kind", "tp"), [("mxfp4_quark", 4), ("bf16", 2), ("mxfp8", 3), ("fp8_channel_1d", 3)]
)
def test_the_last_rank_holds_data_and_not_zeros_alone(kind: str, tp: int, tmp_path: Path) -> None:
    model = tiny.SAMPLES[kind][0]
    tensors = {
        name: replace(content, data=b"\x11" * len(content.data)) if ".experts." in name else content
        for name, content in tiny.tensors_of(model).items()
    }
    source = tiny.write_tensors(tmp_path / "m", model, tensors)
    prepare(source, tmp_path / "out", tp)
    counts = []
    for rank in range(tp):
        found = tiny.read_shard(tmp_path / "out" / f"model-rank-{rank}-part-0.safetensors")
        counts.append({name: content.data.count(b"\x11") for name, content in found.items()})
    assert all(counts[0].values())
    assert all(count == counts[0] for count in counts)


def test_gpt_oss_ranks_take_whole_blocks_and_the_last_what_is_left(empty: Path) -> None:
    model = tiny.Model("mxfp4_gpt_oss", hidden=64, intermediate=288, experts=2)
    plan = plan_for(empty, model, 4)  # 9 blocks: 3, 3, 3 and none
    w13, s13, b13, w2, s2, b2 = plan.blocks[0].stacks
    assert [s.role for s in (w13, s13, b13)] == ["weight", "weight_scale", "bias"]
    shares = [range(96), range(96, 192), range(192, 288)]
    for rank, share in enumerate(shares):
        for stack in (w13, s13, b13):
            gate, up = stack.steps[rank].pieces
            assert gate.rows == range(2 * share.start, 2 * share.stop, 2)
            assert up.rows == range(2 * share.start + 1, 2 * share.stop + 1, 2)
            assert (gate.to_row, up.to_row) == (0, 256)
        assert w2.steps[rank].pieces[0].columns == range(share.start // 2, share.stop // 2)
        assert s2.steps[rank].pieces[0].columns == range(share.start // 32, share.stop // 32)
    for stack in (w13, s13, b13, w2, s2, b2):
        assert stack.steps[3].pieces == ()
        assert stack.steps[3].shape == stack.steps[0].shape
    assert [len(step.pieces) for step in b2.steps] == [1, 0, 0, 0]
    assert plan.warnings == ("nothing is left for rank 3: its experts are padding alone",)


def test_a_short_last_rank_of_gpt_oss_is_padded_as_the_others(empty: Path) -> None:
    plan = plan_for(empty, tiny.Model("mxfp4_gpt_oss", hidden=64, intermediate=320), 3)
    assert [len(part) for part in plan.blocks[0].cut.parts] == [128, 128, 64]
    assert {step.shape for step in plan.blocks[0].stacks[0].steps} == {(2, 512, 128)}
    assert plan.warnings == ()


def test_a_scale_per_channel_is_whole_on_every_rank_of_w2_and_cut_for_w13(empty: Path) -> None:
    for kind in ("fp8_channel_1d", "fp8_channel_n1"):
        plan = plan_for(empty, tiny.Model(kind, hidden=64, intermediate=128), 2)
        scales = {s.name.rpartition(".")[2]: s for s in stacks_of(plan) if s.role == "weight_scale"}
        w13, w2 = scales["w13_weight_scale"], scales["w2_weight_scale"]
        assert [step.pieces[0].rows for step in w2.steps] == [range(64), range(64)]
        assert [step.pieces[0].rows for step in w13.steps] == [range(64), range(64, 128)]
        assert (w13.steps[0].shape, w2.steps[0].shape) == ((2, 128, 1), (2, 64, 1))


# --- sizes that do not work ---------------------------------------------------------------------

NO_PARTS = "{} cannot be cut into {} equal parts"
CUT = "{} columns in blocks of {} would be cut at {}"
NOT_SHARED = [
    # kind, hidden, intermediate, tp; what the message says; what the hint lists
    ("bf16", 64, 320, 3, NO_PARTS.format(320, 3), "1, 2, 4, 5, 8, 10, 16, 20, 32, 40 or 64"),
    ("fp8_block_f32", 128, 1536, 8, CUT.format(1536, 128, 192), "1, 2, 3, 4, 6 or 12"),
    ("fp8_block_f32", 128, 256, 3, NO_PARTS.format(256, 3), "1 or 2"),
    ("mxfp4_quark", 256, 384, 8, CUT.format(384, 32, 48), "1, 2, 3, 4, 6 or 12"),
    ("mxfp4_v4", 256, 96, 2, CUT.format(96, 32, 48), "1 or 3"),
    ("mxfp8", 96, 64, 4, CUT.format(64, 32, 16), "1 or 2"),
    ("fp8_channel_1d", 64, 128, 8, "the padded sizes are 16 (intermediate, per rank)", "1, 2 or 4"),
]


@pytest.mark.parametrize(("kind", "hidden", "size", "tp", "message", "works"), NOT_SHARED)
def test_a_tp_that_does_not_work_is_refused_with_those_that_do(
    kind: str, hidden: int, size: int, tp: int, message: str, works: str, empty: Path
) -> None:
    fault = refusal(empty, tiny.Model(kind, hidden=hidden, intermediate=size), tp)
    assert fault.message.startswith(f"`{EXPERTS}` cannot be shared by {tp} ranks: ")
    assert message in fault.message
    assert fault.hint == f"use --tp {works}"


@pytest.mark.parametrize(
    ("kind", "hidden", "size", "message"),
    [
        ("bf16", 48, 64, "the padded sizes are 64 (intermediate, per rank) and 48 (hidden)"),
        ("fp8_block_f32", 192, 256, "the hidden size is 192, not a multiple of 128"),
        ("fp8_block_f32", 128, 192, "192 columns in blocks of 128 would be cut at 192"),
        ("fp8_channel_1d", 40, 64, "the padded sizes are 64 (intermediate, per rank) and 40"),
    ],
)
def test_a_size_that_no_tp_mends_is_refused(
    kind: str, hidden: int, size: int, message: str, empty: Path
) -> None:
    fault = refusal(empty, tiny.Model(kind, hidden=hidden, intermediate=size))
    assert message in fault.message
    assert fault.hint == "no tensor-parallel size works for this model and target"


@pytest.mark.parametrize(
    ("kind", "size", "works"),
    [
        ("bf16", 768, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        ("mxfp4_quark", 2048, [1, 2, 4, 8, 16, 32, 64]),
        ("mxfp4_gpt_oss", 2880, list(range(1, 65))),
        ("fp8_block_f32", 1536, [1, 2, 3, 4, 6, 12]),
        ("fp8_channel_1d", 1536, [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]),
        ("mxfp8", 96, [1, 3]),
    ],
)
def test_the_sizes_that_work_are_those_for_which_a_plan_is_made(
    kind: str, size: int, works: list[int], empty: Path
) -> None:
    model = tiny.Model(kind, hidden=128, intermediate=size, experts=1)
    plan = plan_for(empty, model)
    assert list(workable_tp([(block.block, block.path) for block in plan.blocks])) == works
    for tp in range(1, 17):
        if tp in works:
            plan_for(empty, model, tp)
        else:
            refusal(empty, model, tp)


def test_the_hint_lists_only_sizes_that_every_module_of_the_model_allows(empty: Path) -> None:
    shapes = tiny.shapes_of(tiny.Model(hidden=64, intermediate=96))
    other = tiny.shapes_of(tiny.Model(hidden=64, intermediate=64, layers=2))
    shapes |= {name: shape for name, shape in other.items() if ".layers.1." in name}
    fault = refusal(empty, tiny.Model(hidden=64), 5, shapes=shapes)
    for tp in (int(word.strip(",")) for word in fault.hint.split() if word[0].isdigit()):
        plan_for(empty, tiny.Model(hidden=64), tp, shapes=shapes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bf16", {"intermediate": 0}),
        ("mxfp4_quark", {"intermediate": 0}),
        ("fp8_channel_1d", {"intermediate": 0}),
        ("mxfp4_gpt_oss", {"intermediate": 0}),
        ("bf16", {"hidden": 0}),
        ("mxfp4_quark", {"hidden": 0}),
        ("mxfp8", {"hidden": 0}),
        ("mxfp4_gpt_oss", {"hidden": 0}),
        ("mxfp4_gpt_oss", {"experts": 0}),
    ],
)
def test_experts_of_no_size_are_refused(kind: str, changes: dict[str, int], empty: Path) -> None:
    with pytest.raises((BadSource, NoRule)):
        plan_for(empty, replace(tiny.Model(kind), **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (128,),
        (128, 64, 2),
    ],
)
def test_a_weight_that_is_no_matrix_is_refused(shape: tuple[int, ...], empty: Path) -> None:
    shapes = {
        name: ("BF16", shape if ".experts." in name else other)
        for name, (_, other) in tiny.shapes_of(tiny.Model()).items()
    }
    with pytest.raises((BadSource, NoRule)):
        plan_for(empty, tiny.Model(), shapes=shapes)


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [0, -1, 4097, 10**9])
def test_a_tp_out_of_range_is_refused(tp: int, empty: Path) -> None:
    fault = refusal(empty, tiny.Model(), tp, InvalidUsage)
    assert fault.message == f"--tp {tp} is out of range: 1 to 4096"


@pytest.mark.parametrize("ranks", [[], [-1], [2], [0, 5]])
def test_ranks_out_of_range_are_refused(ranks: list[int], empty: Path) -> None:
    fault = refusal(empty, tiny.Model(), 2, InvalidUsage, ranks=ranks)
    listed = ",".join(map(str, ranks)) or "[]"
    assert fault.message == f"--ranks {listed} is out of range: 0 to 1"


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_for_shards_out_of_range_is_refused(limit: int, empty: Path) -> None:
    fault = refusal(empty, tiny.Model(), 1, InvalidUsage, max_shard_bytes=limit)
    assert "out of range: at least 1" in fault.message


def test_ranks_are_sorted_and_taken_once(empty: Path) -> None:
    plan = plan_for(empty, tiny.Model(), 4, ranks=[3, 1, 3])
    assert plan.ranks == (1, 3)
    assert not plan.is_complete
    assert {shard.rank for shard in plan.shards} == {1, 3, None}
    for stack in stacks_of(plan):
        assert [step.rank for step in stack.steps] == [1, 3]
    whole = {s.name: s for s in stacks_of(plan_for(empty, tiny.Model(), 4))}
    for stack in stacks_of(plan):
        assert stack.steps == tuple(whole[stack.name].steps[rank] for rank in (1, 3))


def test_all_ranks_are_taken_by_default(empty: Path) -> None:
    plan = plan_for(empty, tiny.Model(), 4)
    assert plan.ranks == (0, 1, 2, 3)
    assert plan.is_complete


# --- target and chip ----------------------------------------------------------------------------


def test_the_first_chip_of_the_target_is_the_default(empty: Path) -> None:
    plan = plan_for(empty, tiny.Model())
    assert (plan.target.name, plan.gfx) == ("aiter", "gfx950")


@pytest.mark.parametrize("gfx", ["gfx90a", "gfx1250", "GFX950", "950"])
def test_a_chip_that_the_target_does_not_know_is_refused(gfx: str, empty: Path) -> None:
    fault = refusal(empty, tiny.Model(), gfx=gfx)
    assert f"does not know the chip `{gfx}`" in fault.message
    assert fault.hint == "use --gfx with one of gfx950, gfx942"


@pytest.mark.parametrize("target", ["vllm@9.99", "AITER", "", "tpu"])
def test_an_unknown_target_is_refused_and_never_guessed(target: str, empty: Path) -> None:
    assert f"target `{target}` is not known" in refusal(empty, tiny.Model(), target=target).message


@pytest.mark.parametrize("kind", tiny.REFUSED)
def test_a_quantisation_without_a_rule_is_refused_by_name(kind: str, empty: Path) -> None:
    message = refusal(empty, tiny.Model(kind)).message
    assert EXPERTS in message or f"takes no {kind} experts" in message


@pytest.mark.parametrize(
    ("kind", "gfx", "weight", "scale"),
    [
        ("bf16", "gfx950", ("BF16", "bfloat16", None), None),
        ("f16", "gfx942", ("F16", "float16", None), None),
        ("fp8_block_f32", "gfx950", ("F8_E4M3", "float8_e4m3fn", None), ("F32", "float32", None)),
        (
            "fp8_block_f32",
            "gfx942",
            ("U8", "float8_e4m3fnuz", "e4m3fn_to_e4m3fnuz"),
            ("F32", "float32", "f32_times_2"),
        ),
        (
            "fp8_block_bf16",
            "gfx942",
            ("U8", "float8_e4m3fnuz", "e4m3fn_to_e4m3fnuz"),
            ("BF16", "bfloat16", "bf16_times_2"),
        ),
        (
            "fp8_channel_n1",
            "gfx950",
            ("F8_E4M3", "float8_e4m3fn", None),
            ("BF16", "bfloat16", None),
        ),
        ("mxfp8", "gfx942", ("F8_E4M3", "float8_e4m3fn", None), ("U8", "float8_e8m0fnu", None)),
        ("mxfp4_v4", "gfx950", ("U8", "float4_e2m1fn_x2", None), ("U8", "float8_e8m0fnu", None)),
    ],
)
def test_dtypes_are_those_of_the_targets_table(
    kind: str,
    gfx: str,
    weight: tuple[str, str, str | None],
    scale: tuple[str, str, str | None] | None,
    empty: Path,
) -> None:
    plan = plan_for(empty, tiny.Model(kind, hidden=128, intermediate=128), gfx=gfx)
    found = {}
    for stack in stacks_of(plan):
        (conversion,) = {source.conversion for source in stack.sources}
        name = None if conversion is None else conversion.name
        found[stack.role] = (stack.dtype, stack.runtime_dtype, name)
    assert found["weight"] == weight
    assert found.get("weight_scale") == scale


def test_a_bias_is_stored_as_f32_from_any_float_and_refused_from_anything_else(
    empty: Path,
) -> None:
    model = tiny.Model("mxfp4_gpt_oss")

    def with_bias(dtype: str) -> dict[str, tiny.Shape]:
        return {
            name: (dtype if name.endswith("bias") else old, shape)
            for name, (old, shape) in tiny.shapes_of(model).items()
        }

    for dtype in ("BF16", "F16", "F32"):
        plan = plan_for(empty, model, shapes=with_bias(dtype))
        biases = [stack for stack in stacks_of(plan) if stack.role == "bias"]
        assert {(stack.dtype, stack.runtime_dtype) for stack in biases} == {("F32", "float32")}
        assert [stack.name for stack in biases] == [f"{EXPERTS}.w13_bias", f"{EXPERTS}.w2_bias"]
    message = refusal(empty, model, shapes=with_bias("I32")).message
    assert f"`{EXPERTS}.gate_up_proj_bias` is I32; the target takes " in message


def test_the_name_of_a_scale_follows_the_source(empty: Path) -> None:
    for kind, suffix in (
        ("fp8_block_f32", "weight_scale_inv"),
        ("mxfp8", "weight_scale_inv"),
        ("mxfp4_v4", "weight_scale"),
        ("mxfp4_quark", "weight_scale"),
        ("mxfp4_gpt_oss", "weight_scale"),
    ):
        plan = plan_for(empty, tiny.Model(kind))
        names = {stack.name for stack in stacks_of(plan) if stack.role == "weight_scale"}
        assert names == {f"{EXPERTS}.w13_{suffix}", f"{EXPERTS}.w2_{suffix}"}


@given(st.integers(1, 5000))
def test_bf16_is_padded_as_aiters_kernels_come(size: int) -> None:
    alignment = Alignment(((192, 64), (None, 128)))
    padded = alignment.pad(size)
    assert padded % 64 == 0
    assert 0 <= padded - size < (64 if size <= 192 else 128)
    assert padded % 128 == 0 or size <= 192
    assert align_to(7).pad(size) % 7 == 0


def test_every_path_of_every_target_names_layouts_that_there_are() -> None:
    for name, target in TARGETS.items():
        assert target_named(name) is target
        for path in target.paths:
            assert path.when.get("chip", frozenset()) <= set(target.chips)
            for form in path.forms.values():
                assert set(form.layouts) <= LAYOUTS.keys()
                assert form.fill != b"\xff"  # E8M0 NaN


# --- config and tensors -------------------------------------------------------------------------


def promise(folder: Path, config_kind: str, tensor_kind: str, **options: Any) -> Plan:
    """Plan tensors of one kind under the config of another."""
    config = tiny.config_of(tiny.Model(config_kind))
    shapes = tiny.shapes_of(tiny.Model(tensor_kind))
    return make_plan(header_only(folder, shapes, config), tp=1, **options)


@pytest.mark.parametrize(
    ("promised", "found"),
    [
        ("mxfp4_quark", "bf16"),
        ("bf16", "mxfp4_quark"),
        ("mxfp4_ct", "fp8_channel_n1"),
        ("fp8_block_f32", "mxfp8"),
        ("mxfp4_v4", "bf16"),
        ("bf16", "fp8_block_bf16"),
        ("mxfp4_gpt_oss", "bf16"),
    ],
)
def test_a_config_that_promises_another_scheme_is_refused_unless_the_tensors_are_trusted(
    promised: str, found: str, empty: Path
) -> None:
    schemes = {"mxfp4": "mxfp4", "fp8_bl": "fp8_block", "fp8_ch": "fp8_channel"}
    names = [
        next((name for key, name in schemes.items() if kind.startswith(key)), kind)
        for kind in (promised, found)
    ]
    with pytest.raises(NoRule) as caught:
        promise(empty, promised, found)
    message = (
        f"the config promises {names[0]} for `{EXPERTS}`, but its tensors are {names[1]} (1 such)"
    )
    assert caught.value.message == message
    assert "--trust-tensors" in caught.value.hint
    plan = promise(empty, promised, found, trust_tensors=True)
    assert plan.blocks[0].block.scheme.name == names[1]
    assert plan.warnings == (f"{message}; the tensors count",)


@pytest.mark.parametrize("kind", tiny.CONVERTIBLE)
def test_a_config_that_keeps_its_promise_brings_no_warning(kind: str, empty: Path) -> None:
    assert plan_for(empty, tiny.Model(kind)).warnings == ()


# --- tensors that no rule knows -----------------------------------------------------------------


def with_unknown(*names: str) -> Mapping[str, tiny.Shape]:
    return {**tiny.shapes_of(tiny.Model()), **dict.fromkeys(names, ("U8", (4,)))}


def test_an_unknown_tensor_stops_the_plan_by_name(empty: Path) -> None:
    fault = refusal(empty, tiny.Model(), shapes=with_unknown("model.magic.weight"))
    assert fault.message == "tensor `model.magic.weight` is known to no family"
    assert "--as-common" in fault.hint
    fault = refusal(empty, tiny.Model(), shapes=with_unknown("a", "b", "c"))
    assert fault.message == "tensor `a` is known to no family (3 such)"


def test_a_control_character_in_an_unknown_name_is_not_printed_raw(empty: Path) -> None:
    fault = refusal(empty, tiny.Model(), shapes=with_unknown("\x1b[2J"))
    assert r"`\x1b[2J`" in fault.message


@pytest.mark.parametrize(
    "patterns", [["model.magic.weight"], ["model.magic.*"], ["*magic*"], ["model.?agic.weight"]]
)
def test_a_tensor_that_is_said_to_be_common_is_copied(patterns: list[str], empty: Path) -> None:
    plan = plan_for(
        empty, tiny.Model(), shapes=with_unknown("model.magic.weight"), as_common=patterns
    )
    assert "model.magic.weight" in {tensor.name for tensor in plan.common}
    check_every_byte_is_taken_once(plan)


def test_a_pattern_fits_whole_names_and_minds_the_case(empty: Path) -> None:
    for pattern in ("magic", "model.magic", "MODEL.MAGIC.WEIGHT"):
        refusal(empty, tiny.Model(), shapes=with_unknown("model.magic.weight"), as_common=[pattern])


def test_a_tensor_below_experts_may_be_said_to_be_common(empty: Path) -> None:
    name = f"{EXPERTS}.0.gate_proj.weight_extra"
    refusal(empty, tiny.Model(), shapes=with_unknown(name))
    plan = plan_for(empty, tiny.Model(), shapes=with_unknown(name), as_common=["*.weight_extra"])
    assert name in {tensor.name for tensor in plan.common}


def test_an_expert_that_is_said_to_be_common_leaves_a_gap(empty: Path) -> None:
    fault = refusal(empty, tiny.Model(), kind=BadSource, as_common=["*.experts.1.up_proj.weight"])
    assert fault.message == f"tensor `{EXPERTS}.1.up_proj.weight` is missing"


def test_a_model_without_routed_experts_has_nothing_to_prepare(empty: Path) -> None:
    shapes = {n: s for n, s in tiny.shapes_of(tiny.Model()).items() if ".experts." not in n}
    fault = refusal(empty, tiny.Model(), shapes=shapes)
    assert fault.message == (
        "`tiny` (TinyMoeForCausalLM) has no routed experts: there is nothing to prepare"
    )
    refusal(empty, tiny.Model(), as_common=["*"])


def test_an_expert_that_is_missing_stops_the_plan(empty: Path) -> None:
    shapes = {n: s for n, s in tiny.shapes_of(tiny.Model()).items() if ".experts.1." not in n}
    fault = refusal(empty, tiny.Model(), kind=BadSource, shapes=shapes)
    assert fault.message == f"`{EXPERTS}` lacks expert 1 (1 missing of 2)"


# --- shards -------------------------------------------------------------------------------------


def names_of(shard: Shard) -> list[str]:
    return sorted(shard.layout.slots)


def test_ranks_come_first_then_what_is_common(empty: Path) -> None:
    plan = plan_for(empty, tiny.Model(layers=2), 2)
    assert [(shard.rank, shard.part, shard.file) for shard in plan.shards] == [
        (0, 0, "model-rank-0-part-0.safetensors"),
        (1, 0, "model-rank-1-part-0.safetensors"),
        (None, 0, "model-common-part-0.safetensors"),
    ]
    assert plan.total_bytes == sum(shard.layout.total_bytes for shard in plan.shards)
    assert names_of(plan.shards[0]) == names_of(plan.shards[1])
    assert names_of(plan.shards[2]) == sorted(tensor.name for tensor in plan.common)


@settings(max_examples=40)
@given(st.integers(1, 400_000), st.integers(1, 3), st.sampled_from(["bf16", "mxfp8", "mxfp4_ct"]))
def test_no_shard_is_larger_than_its_limit_unless_by_a_single_tensor(
    empty: Path, limit: int, layers: int, kind: str
) -> None:
    model = tiny.Model(kind, hidden=128, intermediate=128, layers=layers)
    plan = plan_for(empty, model, 2, max_shard_bytes=limit)
    for shard in plan.shards:
        size = sum(slot.total_bytes for slot in shard.layout.slots.values())
        assert size <= limit or len(shard.layout.slots) == 1
    placed = [f"{shard.rank} {name}" for shard in plan.shards for name in shard.layout.slots]
    wanted = [f"{step.rank} {stack.name}" for stack in stacks_of(plan) for step in stack.steps]
    wanted += [f"None {tensor.name}" for tensor in plan.common]
    assert sorted(placed) == sorted(wanted)
    for rank in (0, 1, None):
        parts = [shard.part for shard in plan.shards if shard.rank == rank]
        assert parts == list(range(len(parts)))


def test_the_tensors_of_a_module_stay_together_where_they_fit(empty: Path) -> None:
    plan = plan_for(empty, tiny.Model("mxfp8", layers=4), 1)
    size = sum(slot.total_bytes for slot in plan.shards[0].layout.slots.values()) // 4
    plan = plan_for(empty, tiny.Model("mxfp8", layers=4), 1, max_shard_bytes=size + size // 2)
    shards = [shard for shard in plan.shards if shard.rank == 0]
    assert len(shards) == 4
    for layer, shard in enumerate(shards):
        assert {name.split(".")[2] for name in shard.layout.slots} == {str(layer)}


def test_planning_writes_nothing_and_reads_no_tensor(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", layers=2)
    checkpoint = open_checkpoint(folder)
    (folder / tiny.SINGLE).write_bytes(b"")  # a reader of tensors would notice
    before = sorted(tmp_path.rglob("*"))
    make_plan(checkpoint, tp=2)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_same_source_gives_the_same_plan(empty: Path) -> None:
    shapes = tiny.shapes_of(tiny.Model(layers=3, experts=12))
    backwards = dict(reversed(shapes.items()))
    config = tiny.config_of(tiny.Model(layers=3, experts=12))
    plans = [
        make_plan(header_only(empty, each, config), tp=2, max_shard_bytes=100_000)
        for each in (shapes, backwards)
    ]
    assert plans[0].shards == plans[1].shards


def test_leftovers_and_folders_are_warned_about(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", spread="layers")
    for name in ("old-1", "old-2"):
        tiny.write_shard(folder / f"{name}.safetensors", {"x": tiny.Tensor("U8", (1,), b"x")})
    (folder / "original").mkdir()
    (folder / "chat_template.jinja").write_text("{{ x }}", "utf-8")
    plan = plan_of(folder)
    assert plan.small_files == ("chat_template.jinja",)
    assert plan.warnings == (
        "2 files that the index does not name: `old-1.safetensors`, `old-2.safetensors`",
        "`original` is not copied: a folder, a large file or no regular file",
    )
