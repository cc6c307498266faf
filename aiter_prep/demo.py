"""Shows the whole round, from inspecting to restoring, on a checkpoint of its own making."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from aiter_prep.errors import AiterPrepError, OutputNotEmpty
from aiter_prep.execution import execute
from aiter_prep.inspection import SourceInspection, inspect_path
from aiter_prep.plan import make_plan
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    Checkpoint,
    open_checkpoint,
)
from aiter_prep.storage.header import TensorInfo
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.reader import FolderReader
from aiter_prep.storage.shard import lay_out_shard
from aiter_prep.verification import verify

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 8, 512, 320
HEADS, HEAD_SIZE, VOCABULARY = 4, 64, 256
TP = 2  # 160 columns for each rank, which are padded to 256
SEED = 2026
NAME = "demo-moe"

_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One step of the demonstration, done.

    Attributes:
        name: `make`, `inspect`, `convert`, `verify`, `restore` or `compare`.
        folder: The folder that it wrote or looked at.
        seconds: How long it took.
        facts: What there is to say about it.
    """

    name: Literal["make", "inspect", "convert", "verify", "restore", "compare"]
    folder: Path
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)


def run_demo(out: str | Path) -> Iterator[DemoStep]:
    """Run the demonstration in a folder, yielding every step as soon as it is done.

    Args:
        out: A folder that is empty or does not exist.

    Raises:
        OutputNotEmpty: It holds something.
        AiterPrepError: A step failed, which is a bug of ours or of the machine.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputNotEmpty(
            f"`{printable(str(out))}` is not empty", "choose a folder that does not exist yet"
        )
    for step in (_make, _inspect, _convert, _verify, _restore, _compare):
        start = time.perf_counter()
        done = step(out)
        yield DemoStep(done.name, done.folder, time.perf_counter() - start, done.facts)


def source_folder(out: Path) -> Path:
    """Return where the checkpoint lies that the demonstration starts from."""
    return out / NAME


def prepared_folder(out: Path) -> Path:
    """Return where its prepared folder lies."""
    return out / f"{NAME}-aiter-tp{TP}-gfx950"


def restored_folder(out: Path) -> Path:
    """Return where the restored checkpoint lies."""
    return out / f"{NAME}-restored"


def _make(out: Path) -> DemoStep:
    folder = source_folder(out)
    make_checkpoint(folder)
    opened = open_checkpoint(folder)
    facts = {"tensors": len(opened.tensors), "total_bytes": opened.total_bytes}
    return DemoStep("make", folder, 0.0, facts)


def _inspect(out: Path) -> DemoStep:
    found = inspect_path(source_folder(out))
    assert isinstance(found, SourceInspection)
    outlook = found.outlooks[0]
    facts = {
        "architecture": found.architecture,
        "scheme": found.groups[0].scheme,
        "modules": found.groups[0].modules,
        "num_experts": found.groups[0].num_experts,
        "workable_tp": list(outlook.workable_tp),
    }
    return DemoStep("inspect", source_folder(out), 0.0, facts)


def _convert(out: Path) -> DemoStep:
    plan = make_plan(open_checkpoint(source_folder(out)), tp=TP, gfx="gfx950")
    manifest = execute(plan, prepared_folder(out))
    facts = {
        "tp": TP,
        "gfx": plan.gfx,
        "intermediate_per_rank": len(plan.blocks[0].cut.parts[0]),
        "padded_intermediate_per_rank": plan.blocks[0].cut.intermediate,
        "shards": len(manifest.shards),
        "tensors": len(manifest.tensors),
        "total_bytes": plan.total_bytes,
    }
    return DemoStep("convert", prepared_folder(out), 0.0, facts)


def _verify(out: Path) -> DemoStep:
    report = verify(prepared_folder(out), source=open_checkpoint(source_folder(out)))
    if not report.is_clean:
        problem = report.problems[0]
        raise AiterPrepError(f"`{printable(problem.file)}`: {problem.what}")
    facts = {"shards": report.shards, "tensors": report.tensors}
    return DemoStep("verify", prepared_folder(out), 0.0, facts)


def _restore(out: Path) -> DemoStep:
    restored = restore(prepared_folder(out), restored_folder(out))
    facts = {"tensors": restored.tensors, "total_bytes": restored.total_bytes}
    return DemoStep("restore", restored_folder(out), 0.0, facts)


def _compare(out: Path) -> DemoStep:
    original, restored = (open_checkpoint(f(out)) for f in (source_folder, restored_folder))
    differing = sorted(differences(original, restored))
    if differing:
        raise AiterPrepError(f"`{differing[0]}` was not restored ({len(differing)} such)")
    facts = {"tensors": len(original.tensors), "differing": 0}
    return DemoStep("compare", restored_folder(out), 0.0, facts)


def differences(one: Checkpoint, other: Checkpoint) -> Iterator[str]:
    """Yield the names of the tensors that two checkpoints do not have in common, byte for byte."""
    yield from one.tensors.keys() ^ other.tensors.keys()
    with FolderReader(one.folder) as left, FolderReader(other.folder) as right:
        for name in one.tensors.keys() & other.tensors.keys():
            a, b = one.tensors[name], other.tensors[name]
            same_kind = (a.dtype, a.shape) == (b.dtype, b.shape)
            if not same_kind or not np.array_equal(_bytes(left, a), _bytes(right, b)):
                yield name


def _bytes(reader: FolderReader, tensor: TensorInfo) -> _Array:
    data = np.empty(tensor.total_bytes, np.uint8)
    reader.read_into(tensor.file, tensor.start, data)
    return data


def make_checkpoint(folder: Path) -> None:
    """Write a small Qwen3-MoE checkpoint with MXFP4 experts, the same bytes every time.

    Its sizes are made up and its weights are random: it opens everywhere and says nothing.
    """
    folder.mkdir(parents=True)
    tensors = dict(_tensors(np.random.default_rng(SEED)))
    names = sorted(tensors)
    half = len(names) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        _write_shard(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for _, array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    (folder / CONFIG_FILE).write_text(json.dumps(_CONFIG, indent=2) + "\n")


def _write_shard(path: Path, tensors: Mapping[str, tuple[str, _Array]]) -> None:
    described = [(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    layout = lay_out_shard(path.name, described, {"format": "pt"})
    with path.open("wb") as file:
        file.write(layout.header)
        for name in layout.slots:
            file.write(tensors[name][1].tobytes())


def _tensors(random: np.random.Generator) -> Iterator[tuple[str, tuple[str, _Array]]]:
    """Yield name, dtype and bytes of every tensor."""
    yield "model.embed_tokens.weight", _bf16(random, VOCABULARY, HIDDEN)
    yield "model.norm.weight", _ones(HIDDEN)
    yield "lm_head.weight", _bf16(random, VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        yield f"{path}.input_layernorm.weight", _ones(HIDDEN)
        yield f"{path}.post_attention_layernorm.weight", _ones(HIDDEN)
        for name in ("q_norm", "k_norm"):
            yield f"{path}.self_attn.{name}.weight", _ones(HEAD_SIZE)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{path}.self_attn.{name}.weight", _bf16(random, HEADS * HEAD_SIZE, HIDDEN)
        yield f"{path}.self_attn.o_proj.weight", _bf16(random, HIDDEN, HEADS * HEAD_SIZE)
        yield f"{path}.mlp.gate.weight", _bf16(random, EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, rows, columns in _EXPERT:
                weight = f"{path}.mlp.experts.{expert}.{name}.weight"
                yield weight, ("U8", random.integers(0, 256, (rows, columns // 2), np.uint8))
                # powers of two around 2^-8, as e8m0 has them
                scales = random.integers(117, 122, (rows, columns // 32), np.uint8)
                yield f"{weight}_scale", ("U8", scales)


_EXPERT = (
    ("gate_proj", INTERMEDIATE, HIDDEN),
    ("up_proj", INTERMEDIATE, HIDDEN),
    ("down_proj", HIDDEN, INTERMEDIATE),
)


def _bf16(random: np.random.Generator, rows: int, columns: int) -> tuple[str, _Array]:
    values = random.standard_normal((rows, columns), np.float32) * np.float32(0.02)
    return "BF16", (values.view(np.uint32) >> np.uint32(16)).astype("<u2")


def _ones(size: int) -> tuple[str, _Array]:
    return "BF16", np.full(size, 0x3F80, "<u2")


_MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "ch_axis": -1,
    "scale_format": "e8m0",
}
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "head_dim": HEAD_SIZE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": {**_MXFP4, "is_dynamic": False},
            "input_tensors": {**_MXFP4, "is_dynamic": True},
            "output_tensors": None,
            "bias": None,
        },
        "exclude": [
            "lm_head",
            *(
                f"model.layers.{layer}.{name}"
                for layer in range(LAYERS)
                for name in (
                    "mlp.gate",
                    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")),
                )
            ),
        ],
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    },
}
