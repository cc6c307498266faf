"""Measures how one rank gets its experts: from the source through vLLM, or prepared.

`scripts/bench-load` runs it; by hand:

    python -m conformance.bench_load source FOLDER           writes a synthetic model
    python -m conformance.bench_load load FOLDER FORMAT OUT  in the engine's environment
    python -m conformance.bench_load table OUT...            prints what was measured
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, HEAD = 4, 128, 2048, 1024, 512, 1, 64
TP = 8
Shapes = dict[str, tuple[int, ...]]


def shapes() -> Iterator[tuple[str, Shapes]]:
    """The tensors of each shard: 6.5 GB of experts in BF16, and next to nothing else."""
    width = HEADS * TP * HEAD
    ends: Shapes = {"model.norm.weight": (HIDDEN,)}
    names = ("model.embed_tokens.weight", "lm_head.weight")
    ends |= dict.fromkeys(names, (VOCABULARY, HIDDEN))
    yield "ends", ends
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        rest: Shapes = {f"{at}.self_attn.{n}_proj.weight": (width, HIDDEN) for n in "qkv"}
        rest |= {f"{at}.self_attn.o_proj.weight": (HIDDEN, width)}
        rest |= {f"{at}.self_attn.{n}_norm.weight": (HEAD,) for n in "qk"}
        rest |= {f"{at}.{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
        rest |= {f"{at}.mlp.gate.weight": (EXPERTS, HIDDEN)}
        for expert in range(EXPERTS):
            one = f"{at}.mlp.experts.{expert}"
            rest |= {f"{one}.{n}_proj.weight": (INTERMEDIATE, HIDDEN) for n in ("gate", "up")}
            rest |= {f"{one}.down_proj.weight": (HIDDEN, INTERMEDIATE)}
        yield f"layer-{layer}", rest


def write_source(folder: Path) -> None:
    """Writes the model; its values are noise, and the same ones in each run."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    noise = random.standard_normal(HIDDEN * INTERMEDIATE, dtype=np.float32)
    values = (noise.view(np.uint32) >> 16).astype(np.uint16)
    place: dict[str, str] = {}
    for stem, tensors in shapes():
        file = f"model-{stem}.safetensors"
        place |= dict.fromkeys(tensors, file)
        sizes = {name: 2 * int(np.prod(shape)) for name, shape in tensors.items()}
        ends = np.cumsum(list(sizes.values())).tolist()
        header = {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [end - sizes[name], end]}
            for (name, shape), end in zip(tensors.items(), ends, strict=True)
        }
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for number, size in enumerate(sizes.values()):
                out.write(np.roll(values, number)[: size // 2].tobytes())
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config()))


def config() -> dict[str, Any]:
    """The model's config."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "head_dim": HEAD,
        "num_attention_heads": HEADS * TP,
        "num_key_value_heads": HEADS * TP,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }


def io_bytes(what: str) -> int:
    """A counter of this process: `rchar`, read by calls, or `read_bytes`, from storage."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)[what])


def forget_cached(folder: Path) -> None:
    """Drops the folder's pages from the cache, so that a run reads from storage."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@contextlib.contextmanager
def peak_memory(found: dict[str, Any]) -> Iterator[None]:
    """Notes by how much the process's own memory, files that it maps aside, grew at most."""

    def own() -> int:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    start, done = own(), threading.Event()
    peak = [start]

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], own())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        found["peak_bytes"] = max(peak[0], own()) - start


def measured(folder: Path, load_format: str) -> dict[str, Any]:
    """Builds the model as rank 0, then loads it under measurement."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader import utils as loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from conformance.engine_dump import Job, as_rank, engine_config, start_one_process_world

    class Copies(TorchDispatchMode):
        count = total = 0

        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket in {torch.ops.aten.copy_, torch.ops.aten.clone}:
                self.count += 1
                self.total += result.nbytes
            return result

    engine = engine_config(Job(folder, folder, TP, {"load_format": load_format}))
    start_one_process_world(engine)
    found: dict[str, Any] = {"load_format": load_format}
    model_config = engine.model_config
    cpu = torch.device("cpu")
    with as_rank(0, TP, False), set_current_vllm_config(engine):
        with set_default_torch_dtype(model_config.dtype), cpu:
            model = loading.initialize_model(vllm_config=engine, model_config=model_config)
        loader = get_model_loader(engine.load_config)
        forget_cached(folder)
        before = {what: io_bytes(what) for what in ("rchar", "read_bytes")}
        copies = Copies()
        with peak_memory(found), copies:
            start = time.perf_counter()
            loader.load_weights(model, model_config)
            found["load_seconds"] = time.perf_counter() - start
            loading.process_weights_after_loading(model, model_config, cpu)
            found["seconds"] = time.perf_counter() - start
    found |= {what: io_bytes(what) - value for what, value in before.items()}
    found |= {"copies": copies.count, "copied_bytes": copies.total}
    return found


def load(folder: Path, load_format: str, out: Path, sources: Path) -> None:
    """Measures one load and writes the numbers down."""
    from conformance import engine_dump

    engine_dump.install(sources, "gfx950")
    importlib.import_module("vllm.model_executor.model_loader.utils")
    out.write_text(json.dumps(measured(folder, load_format)))


def table(files: list[Path]) -> str:
    """The numbers as Markdown."""
    gib = 2**30
    rows = ["| | read from disk | copies | copied | seconds | of these, shuffling | peak memory |"]
    rows.append("|---|---|---|---|---|---|---|")
    names = {"auto": "source, vLLM's loader", "aiter_prep": "prepared folder"}
    for file in files:
        run = json.loads(file.read_text())
        cells = [
            names[run["load_format"]],
            f"{run['read_bytes'] / gib:.2f} GiB",
            str(run["copies"]),
            f"{run['copied_bytes'] / gib:.2f} GiB",
            f"{run['seconds']:.1f}",
            f"{run['seconds'] - run['load_seconds']:.1f}",
            f"{run['peak_bytes'] / gib:.2f} GiB",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Runs the command line."""
    command, *words = sys.argv[1:]
    if command == "source":
        write_source(Path(words[0]))
    elif command == "load":
        load(Path(words[0]), words[1], Path(words[2]), Path(words[3]))
    else:
        sys.stdout.write(table([Path(word) for word in words]) + "\n")


if __name__ == "__main__":
    main()
