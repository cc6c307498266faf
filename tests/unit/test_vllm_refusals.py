"""What the vLLM plugin refuses, with stand-ins for the engine; tests/conformance has the engine."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepared
import tiny
from aiter_prep.layouts.table import LAYOUTS
from aiter_prep.manifest import Manifest, read_manifest

torch = pytest.importorskip("torch")

# these need torch
from aiter_prep.engines.mismatch import EngineMismatch, convert_command  # noqa: E402
from aiter_prep.engines.reading import stored_tensors  # noqa: E402
from aiter_prep.engines.vllm import checks, contract, fingerprint, layers  # noqa: E402
from aiter_prep.engines.vllm.layers import ExpertLayer  # noqa: E402

pytestmark = pytest.mark.torch

_MOE = "vllm.model_executor.layers.fused_moe."
UNQUANTIZED = _MOE + "unquantized_fused_moe_method.UnquantizedFusedMoEMethod"
MXFP4 = "vllm.model_executor.layers.quantization.mxfp4.Mxfp4MoEMethod"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bf16 checkpoint, prepared for two ranks of vLLM."""
    base = tmp_path_factory.mktemp("refusals")
    source = tiny.write(base / "source", kind="bf16", hidden=256, intermediate=512)
    prepared.prepare(source, base / "out", 2, target="vllm")
    return base / "out"


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    """Its manifest."""
    return read_manifest(folder)


def made(full_name: str, **attributes: Any) -> Any:
    """An object whose class has this full name."""
    module, _, name = full_name.rpartition(".")
    return type(name, (), {"__module__": module, **attributes})()


def parallel(**changes: Any) -> Any:
    """vLLM's FusedMoEParallelConfig, as far as it is looked at."""
    plain = {"tp_size": 2, "tp_rank": 0, "ep_size": 1, "ep_rank": 0}
    return types.SimpleNamespace(**{**plain, "use_ep": False, "enable_eplb": False, **changes})


def layer_of(folder: Path, **changes: Any) -> ExpertLayer:
    """The first expert layer, as an engine would have built it."""
    manifest = read_manifest(folder)
    block = manifest.model["blocks"][0]
    stored = {s.record.name: s for s in stored_tensors(folder, manifest, 0)}
    tensors = {leaf: stored[f"{block['experts']}.{leaf}"] for leaf in ("w13_weight", "w2_weight")}
    module = torch.nn.Module()
    for leaf, tensor in tensors.items():
        data = torch.empty(tensor.record.shape, dtype=changes.get("dtype", torch.bfloat16))
        module.register_parameter(leaf, torch.nn.Parameter(data, requires_grad=False))
    module.moe_config = types.SimpleNamespace(
        hidden_dim_unpadded=block["hidden"],
        hidden_dim=block["padded_hidden"],
        intermediate_size_per_partition=block["padded_intermediate_per_rank"],
    )
    module._expert_map = changes.get("expert_map")
    backend = types.SimpleNamespace(name=changes.get("backend", "AITER"))
    module.quant_method = made(UNQUANTIZED, unquantized_backend=backend)
    known = contract.METHODS[UNQUANTIZED]
    path = f"{block['experts']}.routed_experts"
    return ExpertLayer(path, module, known, block, tensors)


def refusal(call: Callable[[], object]) -> str:
    """The text of the refusal that a call ends in."""
    with pytest.raises(EngineMismatch) as caught:
        call()
    assert caught.value.hint, "no way out"
    return str(caught.value)


# --- what fits passes ---------------------------------------------------------------------------


def test_what_fits_is_not_refused(folder: Path, manifest: Manifest) -> None:
    assert checks.rank_of(parallel(tp_rank=1), manifest) == 1
    checks.check_layer(layer_of(folder), manifest)


def test_a_method_is_known_in_every_class_of_the_table() -> None:
    assert all(name.startswith("vllm.") for name in (*contract.METHODS, *contract.LAYERS))
    for method in contract.METHODS.values():
        assert method.schemes
        assert method.row_orders
        assert callable(method.rebuild)


# --- ranks --------------------------------------------------------------------------------------


def test_another_tensor_parallel_size_is_refused(manifest: Manifest) -> None:
    said = refusal(lambda: checks.rank_of(parallel(tp_size=4), manifest))
    assert "prepared for tp 2 and ep 1" in said
    assert "shared by tp 4 and ep 1" in said
    assert "aiter-prep convert source OUT --target vllm@0.33 --gfx gfx950 --tp 4" in said
    assert "`--tensor-parallel-size 2`" in said


def test_expert_parallelism_is_refused_by_a_folder_without_it(manifest: Manifest) -> None:
    changes = {"tp_size": 1, "ep_size": 2, "use_ep": True}
    said = refusal(lambda: checks.rank_of(parallel(**changes), manifest))
    assert "shared by tp 1 and ep 2" in said
    assert "--ep 2" in said


def test_tensor_parallelism_is_refused_by_a_folder_for_expert_parallelism(
    manifest: Manifest,
) -> None:
    other = replace(manifest, target={**manifest.target, "tp": 1, "ep": 2})
    said = refusal(lambda: checks.rank_of(parallel(), other))
    assert "--enable-expert-parallel" in said
    assert "--tp 2" in said


def test_a_rank_that_was_not_prepared_is_refused(manifest: Manifest) -> None:
    part = replace(manifest, target={**manifest.target, "ranks": [1]})
    said = refusal(lambda: checks.rank_of(parallel(tp_rank=0), part))
    assert "rank 0, the folder holds 1" in said
    assert "aiter-prep convert" in said


def test_experts_that_move_while_the_engine_runs_are_refused(manifest: Manifest) -> None:
    said = refusal(lambda: checks.rank_of(parallel(enable_eplb=True), manifest))
    assert "--enable-eplb" in said


def test_other_experts_on_a_rank_are_refused(folder: Path, manifest: Manifest) -> None:
    experts = layer_of(folder).tensors["w13_weight"].record.shape[0]
    same = torch.arange(experts, dtype=torch.int32)
    checks.check_layer(layer_of(folder, expert_map=same), manifest)
    said = refusal(lambda: checks.check_layer(layer_of(folder, expert_map=same.flip(0)), manifest))
    assert "this rank runs" in said
    assert "--expert-placement-strategy linear" in said


# --- the way through the engine -----------------------------------------------------------------


def test_another_backend_is_refused(folder: Path, manifest: Manifest) -> None:
    said = refusal(lambda: checks.check_layer(layer_of(folder, backend="TRITON"), manifest))
    assert "the engine selected backend `TRITON`" in said
    assert "prepared for AITER" in said
    assert "VLLM_ROCM_USE_AITER=1" in said


def test_another_row_order_is_refused(folder: Path, manifest: Manifest) -> None:
    layer = layer_of(folder)
    other = replace(layer, block={**layer.block, "row_order": "interleaved_16"})
    said = refusal(lambda: checks.check_layer(other, manifest))
    assert "lie interleaved_16" in said
    assert "wants them separated" in said
    assert "aiter-prep convert" in said


@pytest.mark.parametrize(
    ("is_k3", "wanted", "option"),
    [
        (False, "separated", "--activation-dtype fp4"),
        (False, "interleaved_16", None),
        (True, "interleaved_16", "--activation-dtype fp8"),
        (True, "separated", None),
    ],
)
def test_the_command_names_the_option_that_flags_of_the_run_ask_for(
    manifest: Manifest, is_k3: bool, wanted: str, option: str | None
) -> None:
    method = made(MXFP4, is_k3_situ_aiter=is_k3)
    command = convert_command(manifest, checks._options(method, wanted))
    assert (option in command) if option else ("--activation-dtype" not in command)


def test_a_version_that_prepares_a_layer_otherwise_is_refused(folder: Path) -> None:
    layer = layer_of(folder)
    layer = replace(layer, known=replace(layer.known, since="0.33"))
    checks.check_since(layer, "0.33")
    said = refusal(lambda: checks.check_since(layer, "0.32"))
    assert "are served from vLLM 0.33 on, this one is 0.32" in said
    assert "pip install 'vllm>=0.33'" in said


@pytest.mark.parametrize(
    ("attributes", "order"),
    [
        ({"is_k3_situ_aiter": False, "a4w4": False}, "interleaved_16"),
        ({"is_k3_situ_aiter": False, "a4w4": True}, "separated"),
    ],
)
def test_the_row_order_of_mxfp4_follows_the_flags_of_the_run(
    attributes: dict[str, bool], order: str
) -> None:
    moe = types.SimpleNamespace(use_mxfp4_w4a4_dsv4=attributes["a4w4"])
    method = made(MXFP4, moe=moe, is_k3_situ_aiter=attributes["is_k3_situ_aiter"])
    wanted = contract.METHODS[MXFP4].row_orders["AITER_MXFP4_BF16"]
    assert callable(wanted)
    assert wanted(method) == order


def test_another_scheme_is_refused(folder: Path, manifest: Manifest) -> None:
    layer = layer_of(folder)
    other = replace(layer, block={**layer.block, "scheme": "fp8_block"})
    said = refusal(lambda: checks.check_layer(other, manifest))
    assert "prepared from fp8_block, the engine made a `UnquantizedFusedMoEMethod`" in said


def test_an_unknown_class_is_refused_and_so_is_a_subclass() -> None:
    module = made(_MOE + "routed_experts.RoutedExperts", quant_method=made(MXFP4))
    assert layers._known("layers.0", module) is contract.METHODS[MXFP4]
    subclass = type("DeepseekV4HeterogeneousMxfp4MoEMethod", (type(made(MXFP4)),), {})
    module.quant_method = subclass()
    said = refusal(lambda: layers._known("layers.0", module))
    assert "DeepseekV4HeterogeneousMxfp4MoEMethod" in said
    odd = made("vllm.models.other.Experts", quant_method=made(MXFP4))
    assert "vllm.models.other.Experts" in refusal(lambda: layers._known("layers.0", odd))


# --- sizes and parameters -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("hidden_dim_unpadded", "hidden size"),
        ("hidden_dim", "padded hidden size"),
        ("intermediate_size_per_partition", "padded intermediate size per rank"),
    ],
)
def test_another_size_is_refused(folder: Path, manifest: Manifest, name: str, what: str) -> None:
    layer = layer_of(folder)
    setattr(layer.module.moe_config, name, 999)
    said = refusal(lambda: checks.check_layer(layer, manifest))
    assert f"the {what} of" in said
    assert "the engine wants 999" in said
    assert "aiter-prep convert" in said


def test_another_shape_is_refused(folder: Path, manifest: Manifest) -> None:
    layer = layer_of(folder)
    layer.module.w13_weight = torch.nn.Parameter(torch.empty(1, 2, dtype=torch.bfloat16))
    said = refusal(lambda: checks.check_layer(layer, manifest))
    assert "made room for torch.bfloat16 [1, 2]" in said


def test_another_dtype_is_refused(folder: Path, manifest: Manifest) -> None:
    said = refusal(lambda: checks.check_layer(layer_of(folder, dtype=torch.float16), manifest))
    assert "torch.bfloat16" in said
    assert "made room for torch.float16" in said
    assert "--dtype bfloat16" in said


def test_a_parameter_that_the_folder_lacks_is_refused(folder: Path, manifest: Manifest) -> None:
    layer = layer_of(folder)
    layer.module.w2_bias = torch.nn.Parameter(torch.empty(2), requires_grad=False)
    assert "the folder lacks `w2_bias`" in refusal(lambda: checks.check_layer(layer, manifest))


def test_a_tensor_that_the_engine_does_not_know_is_refused(
    folder: Path, manifest: Manifest
) -> None:
    layer = layer_of(folder)
    del layer.module.w2_weight
    said = refusal(lambda: checks.check_layer(layer, manifest))
    assert "the engine does not know `w2_weight`" in said


# --- chip, AITER, version, target ---------------------------------------------------------------


@pytest.mark.parametrize("found", ["gfx942", "cpu"])
def test_another_chip_is_refused(
    manifest: Manifest, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "running_chip", lambda: found)
    said = refusal(lambda: checks.check_chip(manifest))
    assert f"prepared for gfx950, this process runs on {found}" in said
    assert ("--gfx gfx942" in said) == (found == "gfx942")


def stand_in_for_aiter(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Register an `aiter` that lays out as our tables say, then changes the result."""

    def laid_out(name: str, matrix: Any) -> Any:
        array = matrix.numpy()
        stored = LAYOUTS[name].apply(array if array.ndim == 3 else array[None])
        return change(torch.from_numpy(stored.reshape(array.shape)))

    def by_expert(name: str, matrix: Any, experts: int) -> Any:
        shape = matrix.shape
        return laid_out(name, matrix.reshape(experts, -1, shape[-1])).reshape(shape)

    def shuffle_scale_a16w4(matrix: Any, experts: int, gate_up: bool) -> Any:
        name = "e8m0_interleaved_16" if gate_up else "e8m0_unpadded_rows"
        return by_expert(name, matrix, experts)

    shuffle: Any = types.ModuleType("aiter.ops.shuffle")
    shuffle.shuffle_weight = lambda x, _layout: laid_out("tile_16x16", x)
    shuffle.shuffle_weight_a16w4 = lambda x, _lanes, _up: laid_out("tile_16x16_interleaved_16", x)
    shuffle.shuffle_scale_a16w4 = shuffle_scale_a16w4
    fp4: Any = types.ModuleType("aiter.utility.fp4_utils")
    fp4.e8m0_shuffle = lambda x: laid_out("e8m0", x)
    for name in ("aiter", "aiter.ops", "aiter.utility"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "aiter.ops.shuffle", shuffle)
    monkeypatch.setitem(sys.modules, "aiter.utility.fp4_utils", fp4)


def with_layout(manifest: Manifest, name: str) -> Manifest:
    """The same manifest with another layout in use."""
    from aiter_prep.manifest import describe_layout

    records = tuple(
        replace(record, layout=name) if record.is_shuffled else record
        for record in manifest.tensors
    )
    return replace(manifest, tensors=records, layouts={name: describe_layout(LAYOUTS[name])})


COMPARED = [
    "tile_16x16",
    "tile_16x16_interleaved_16",
    "e8m0",
    "e8m0_interleaved_16",
    "e8m0_unpadded_rows",
]


@pytest.mark.parametrize("name", COMPARED)
def test_an_aiter_that_does_what_the_folder_says_passes(
    manifest: Manifest, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_aiter(monkeypatch, lambda stored: stored)
    fingerprint.check_fingerprint(with_layout(manifest, name))


@pytest.mark.parametrize("name", COMPARED)
def test_an_aiter_that_lays_out_otherwise_is_refused(
    manifest: Manifest, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_aiter(monkeypatch, lambda stored: stored.flip(-1))
    said = refusal(lambda: fingerprint.check_fingerprint(with_layout(manifest, name)))
    assert f"lays out `{name}` in another way" in said
    assert "aiter-prep convert" in said


@pytest.mark.parametrize("missing", ["aiter", "aiter.ops.shuffle"])
def test_a_missing_aiter_is_refused(
    manifest: Manifest, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_aiter(monkeypatch, lambda stored: stored)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "aiter.ops.shuffle", raising=missing == "aiter")
    said = refusal(lambda: fingerprint.check_fingerprint(manifest))
    assert "AITER is not installed" in said
    assert "pip install amd-aiter" in said


def test_the_other_package_called_aiter_is_refused(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_aiter(monkeypatch, lambda stored: stored)
    monkeypatch.setitem(sys.modules, "aiter.ops.shuffle", types.ModuleType("aiter.ops.shuffle"))
    said = refusal(lambda: fingerprint.check_fingerprint(manifest))
    assert "has no `aiter.ops.shuffle.shuffle_weight`" in said


def test_bytes_of_the_fingerprint_tell_every_place_in_a_tile_apart() -> None:
    matrix = fingerprint._matrix()
    rows = {bytes(row) for row in matrix.reshape(-1, matrix.shape[-1])}
    assert len(rows) == matrix.shape[0] * matrix.shape[1]
    assert len({bytes(column) for column in np.moveaxis(matrix, -1, 0)}) == matrix.shape[-1]


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.32.0", "0.32"),
        ("0.33.1.dev4+rocm", "0.33"),
        ("0.31.9", None),
        ("0.34.0", None),
        ("0.330.0", None),
        ("dev", None),
    ],
)
def test_only_versions_of_the_table_are_served(
    version: str, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = types.ModuleType("vllm")
    engine.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm", engine)
    if known:
        assert contract.running_version() == known
        return
    said = refusal(contract.running_version)
    assert f"vLLM {version} is not known" in said
    assert "0.32, 0.33" in said


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_a_folder_for_another_target_is_refused(manifest: Manifest, version: str) -> None:
    contract.check_target(manifest, version)
    other = replace(manifest, target={**manifest.target, "name": "aiter"})
    said = refusal(lambda: contract.check_target(other, version))
    assert "prepared for `aiter`" in said
    assert "--target vllm@0.33" in said


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "blocks", "found"),
    [
        ("model.layers.3.mlp.experts.routed_experts", ["model.layers.3.mlp.experts"], 0),
        ("model.layers.0.ffn.experts.routed_experts", ["layers.0.ffn.experts"], 0),
        ("language_model.model.layers.1.mlp.experts", ["model.layers.1.mlp.experts"], 0),
        ("model.layers.13.mlp.experts.routed_experts", ["model.layers.3.mlp.experts"], None),
        ("model.layers.3.mlp.experts", ["model.layers.3.block_sparse_moe.experts"], None),
        (
            "model.layers.0.mlp.experts",
            ["mtp.layers.0.mlp.experts", "model.layers.0.mlp.experts"],
            1,
        ),
        ("mtp.layers.0.mlp.experts", ["mtp.layers.0.mlp.experts", "model.layers.0.mlp.experts"], 0),
    ],
)
def test_modules_of_the_engine_are_found_by_the_end_of_their_path(
    path: str, blocks: list[str], found: int | None
) -> None:
    assert layers.experts_at(path, blocks) == (None if found is None else blocks[found])


def test_a_draft_model_does_not_take_the_layers_of_the_main_one(manifest: Manifest) -> None:
    blocks = ["model.layers.0.mlp.experts", "mtp.layers.0.mlp.experts"]
    architecture = manifest.model["architecture"]
    layers._check_main(manifest, blocks, blocks[0], architecture)
    said = refusal(lambda: layers._check_main(manifest, blocks, blocks[0], "Qwen3NextMTP"))
    assert "`Qwen3NextMTP` is not the model" in said


def test_the_command_repeats_what_the_folder_was_prepared_with(manifest: Manifest) -> None:
    asked = replace(
        manifest,
        target={**manifest.target, "tp": 1, "ep": 4, "placement": "round_robin"},
        options={**manifest.options, "engine": {"moe_backend": "aiter"}},
    )
    assert convert_command(asked) == (
        "`aiter-prep convert source OUT --target vllm@0.33 --gfx gfx950 --ep 4 "
        "--placement round_robin --moe-backend aiter`"
    )
