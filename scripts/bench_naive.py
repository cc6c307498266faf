"""What people write today, as plainly as they do: no plan, no check, no digest, no sync.

    python scripts/bench_naive.py SOURCE OUT TP

It keeps every rank's tensors until the end, as `save_file` wants them, and knows only separate
gate, up and down projections whose sizes need no padding.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(.+)")


def shuffle_weight(matrix: torch.Tensor) -> torch.Tensor:
    """AITER's tiles of 16 rows by 32 bytes, for `[experts, rows, columns]`."""
    experts, rows, columns = matrix.shape
    width = 16 // matrix.element_size()
    tiles = matrix.view(experts, rows // 16, 16, columns // (2 * width), 2, width)
    return tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(experts, rows, columns)


def shuffle_scale(matrix: torch.Tensor) -> torch.Tensor:
    """AITER's order of e8m0 scales, for `[experts, rows, columns]` that need no padding."""
    experts, rows, columns = matrix.shape
    tiles = matrix.view(experts * rows // 32, 2, 16, columns // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).contiguous().view(experts, rows, columns)


def convert(source: Path, out: Path, tp: int) -> None:
    """Write one file for each rank."""
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(tp)]
    for file in sorted(source.glob("*.safetensors")):
        tensors = load_file(file)
        experts: dict[tuple[str, str], dict[str, dict[int, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            if found := EXPERT.fullmatch(name):
                path, expert, projection, kind = found.groups()
                group = experts.setdefault((path, kind), {})
                group.setdefault(projection, {})[int(expert)] = tensor
            else:
                ranks[0][name] = tensor
        for (path, kind), projections in experts.items():
            shuffle = shuffle_weight if kind == "weight" else shuffle_scale
            if kind == "weight_scale_inv":  # the scales of FP8 blocks stay in order
                shuffle = torch.Tensor.contiguous
            for rank, held in enumerate(ranks):
                parts = {}
                for projection, matrices in projections.items():
                    axis = 1 if projection == "down_proj" else 0
                    size = matrices[0].shape[axis] // tp
                    cut = [m.narrow(axis, rank * size, size) for _, m in sorted(matrices.items())]
                    parts[projection] = torch.stack(cut)
                w13 = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
                held[f"{path}.w13_{kind}"] = shuffle(w13)
                held[f"{path}.w2_{kind}"] = shuffle(parts["down_proj"])
    out.mkdir()
    for rank, held in enumerate(ranks):
        save_file(held, out / f"rank-{rank}.safetensors")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
