"""Scales that are no numbers, or no sizes, never become other bytes in silence."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import oracle_engines
import tiny
import tiny_families
from aiter_prep.errors import NoRule
from aiter_prep.execution import execute
from aiter_prep.layouts.merges import MERGES
from aiter_prep.layouts.unfit import UnfitValue
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.verification import verify
from families_table import model
from oracle_recipes import recipes_for
from tiny_families import Experts, Family

EXPERTS = "model.layers.0.mlp.experts"
NAN, INF = float("nan"), float("inf")
CASES = [(target, gfx) for target in ("aiter", "vllm", "sglang") for gfx in ("gfx950", "gfx942")]
VALUES = [NAN, -NAN, INF, -INF, -1.0, -0.0, 0.0, 1e-40, -1e-40, 1e-38, 2e-38, 0.75, 60000.0, 3e38]
REFUSED_INPUTS = [NAN, INF, -INF, -1.0]
REFUSED_WEIGHTS = [*REFUSED_INPUTS, 1e-40, -1e-40]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: what a crash leaves behind is the subject of other tests."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


def source_with(folder: Path, changed: dict[str, float]) -> Path:
    """Write a checkpoint whose scales with these endings have other values."""
    family = Family(
        model("qwen3_moe"),
        (Experts(EXPERTS, "fp8_tensor_static"),),
        quantization={"quant_method": "fp8", "activation_scheme": "static"},
        hidden=128,
        intermediate=128,
    )
    source = tiny_families.write(folder / "source", "values", family)
    patch(source / "model.safetensors", changed)
    return source


def patch(shard: Path, changed: dict[str, float]) -> None:
    """Write other values into scales."""
    data = bytearray(shard.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    for ending, value in changed.items():
        names = [name for name in header if name.endswith(ending)]
        assert names, ending
        for name in names:
            start, _ = header[name]["data_offsets"]
            data[8 + size + start : 12 + size + start] = struct.pack("<f", value)
    shard.write_bytes(data)


def stored(out: Path) -> dict[tuple[int, str], tiny.Tensor]:
    shard = tiny.read_shard(out / "model-rank-0-part-0.safetensors")
    return {(0, name): tensor for name, tensor in shard.items()}


@pytest.mark.parametrize(
    "ending",
    [
        "1.gate_proj.weight_scale",
        "2.down_proj.weight_scale",
        "3.up_proj.input_scale",
        "0.down_proj.input_scale",
        "_proj.input_scale",
        "1.up_proj.weight",
    ],
)
@pytest.mark.parametrize(("target", "gfx"), CASES)
def test_any_value_is_refused_by_name_or_brings_the_bytes_of_the_oracle(
    ending: str, target: str, gfx: str, tmp_path: Path
) -> None:
    for number, value in enumerate(VALUES):
        folder = tmp_path / str(number)
        source = source_with(folder, {ending: value})
        plan = make_plan(open_checkpoint(source), target=target, gfx=gfx)
        try:
            wanted = oracle_engines.expected(source, recipes_for(target), 1, gfx)
        except ValueError:
            with pytest.raises(NoRule, match=r"^`model.*(weight|_scale)` (is|holds) ") as caught:
                execute(plan, folder / "out")
            assert caught.value.hint.startswith(("mend the checkpoint", "convert for gfx950"))
            continue
        execute(plan, folder / "out")
        found = stored(folder / "out")
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert found[key].data == tensor.data, (value, key)


@pytest.mark.parametrize("value", REFUSED_INPUTS)
@pytest.mark.parametrize("which", ["3.down_proj", "0.gate_proj", "_proj"])
def test_a_scale_of_inputs_that_is_no_size_stops_the_conversion(
    value: float, which: str, tmp_path: Path
) -> None:
    source = source_with(tmp_path, {f"{which}.input_scale": value})
    with pytest.raises(NoRule, match=rf"{which}.input_scale` is {value}: ") as caught:
        execute(make_plan(open_checkpoint(source), target="vllm"), tmp_path / "out")
    assert "calibrate" in caught.value.hint


def test_zeros_in_some_experts_are_passed_over_and_zeros_in_all_are_refused(
    tmp_path: Path,
) -> None:
    some = source_with(tmp_path / "some", {"experts.1.down_proj.input_scale": 0.0})
    execute(make_plan(open_checkpoint(some), target="vllm"), tmp_path / "out")
    value = stored(tmp_path / "out")[0, f"{EXPERTS}.w2_input_scale"]
    assert np.frombuffer(value.data, "<f4")[0] > 0
    every = source_with(tmp_path / "all", {"down_proj.input_scale": 0.0})
    with pytest.raises(NoRule, match=r"experts.0.down_proj.input_scale` is 0.0, as is that"):
        execute(make_plan(open_checkpoint(every), target="vllm"), tmp_path / "every")


@pytest.mark.parametrize("value", REFUSED_WEIGHTS)
@pytest.mark.parametrize("gfx", ["gfx950", "gfx942"])
def test_a_scale_that_cannot_be_merged_is_named_with_the_value_of_the_source(
    value: float, gfx: str, tmp_path: Path
) -> None:
    source = source_with(tmp_path, {"experts.2.up_proj.weight_scale": value})
    shown = repr(float(np.float32(value)))
    name = f"{EXPERTS}.2.up_proj.weight_scale"
    with pytest.raises(NoRule) as caught:
        execute(make_plan(open_checkpoint(source), target="vllm", gfx=gfx), tmp_path / "out")
    assert caught.value.message.startswith(f"`{name}` is {shown}: ")


def test_two_zero_scales_of_an_expert_are_named(tmp_path: Path) -> None:
    changed = {"experts.1.gate_proj.weight_scale": 0.0, "experts.1.up_proj.weight_scale": 0.0}
    source = source_with(tmp_path, changed)
    with pytest.raises(NoRule, match=r"experts.1.gate_proj.weight_scale` is 0.0: the engine div"):
        execute(make_plan(open_checkpoint(source), target="vllm"), tmp_path / "out")


def test_a_weight_beyond_f16_under_its_scale_is_named(tmp_path: Path) -> None:
    source = source_with(tmp_path, {"experts.3.up_proj.weight_scale": 60000.0})
    with pytest.raises(NoRule, match=r"experts.3.up_proj.weight` holds .* \(byte 0x.*60000.0"):
        execute(make_plan(open_checkpoint(source), target="vllm"), tmp_path / "out")


def test_a_folder_that_holds_what_is_refused_now_does_not_verify(tmp_path: Path) -> None:
    source = source_with(tmp_path, {})
    out = tmp_path / "out"
    execute(make_plan(open_checkpoint(source), target="vllm"), out)
    patch(source / "model.safetensors", {"experts.0.down_proj.input_scale": NAN})
    report = verify(out, source=open_checkpoint(source))
    assert not report.is_clean
    assert any("0.down_proj.input_scale` is nan" in str(p) for p in report.problems)


def factors(*values: float) -> npt.NDArray[np.uint8]:
    return np.array(values, "<f4").view(np.uint8).reshape(1, len(values), 4)


@pytest.mark.parametrize(
    ("parts", "scales", "part", "value"),
    [
        ((factors(1, NAN), factors(1, 1)), (1.0, 2.0), 0, "nan"),
        ((factors(1, 1), factors(3e38, 1)), (1.0, 2.0), 1, repr(float(np.float32(3e38)))),
        ((factors(1, 1), factors(1, 1)), (0.0, 0.0), 0, "0.0"),
        ((factors(1, 1), factors(1, 1)), (1.0, NAN), 1, "nan"),
        ((factors(1, INF),), (1.0,), 0, "inf"),
    ],
)
def test_factors_of_rows_are_folded_to_finite_numbers_or_refused(
    parts: tuple[npt.NDArray[np.uint8], ...], scales: tuple[float, ...], part: int, value: str
) -> None:
    with pytest.raises(UnfitValue) as caught:
        MERGES["fold_scale_into_rows"].forward(parts, [np.array([s], "<f4") for s in scales])
    assert (caught.value.part, caught.value.value) == (part, value)


def test_a_single_part_with_a_scale_of_zero_becomes_zeros_as_in_the_engine() -> None:
    (folded,) = MERGES["fold_scale_into_rows"].forward([factors(1, 2)], [np.array([0], "<f4")])
    assert folded.view("<f4").ravel().tolist() == [0.0, 0.0]
