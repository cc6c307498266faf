"""Lets the product's loader serve bf16 experts on a CPU: undoes their layout after it placed them.

For tests alone: CPU kernels know no layout of AITER's. Registered as a plugin of vLLM beside the
product's own, so that it runs in every process. `AITER_PREP_TEST_SHIM` chooses what it does:

* `unshuffle`: undo the layout of every tensor that is flagged;
* `none`: leave the bytes as they are;
* `wrong_flag`: take the flag off w2 first, so that it stays as it is;
* `wrong_rank`: as `unshuffle`, but every process loads the shard of the last rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VARIABLE = "AITER_PREP_TEST_SHIM"
PLUGIN = "conformance.cpu_shim:register"
MODES = ("unshuffle", "none", "wrong_flag", "wrong_rank")


def register() -> None:
    """Changes the product's loader in this process."""
    from aiter_prep.engines.vllm import checks, contract, loader
    from aiter_prep.engines.vllm.placing import place

    mode = os.environ[VARIABLE]
    assert mode in MODES, mode
    name = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method."
    known = contract.METHODS[name + "UnquantizedFusedMoEMethod"]
    known.row_orders["CPU"] = contract.SEPARATED
    checks.running_chip = lambda: "gfx950"
    vars(loader)["check_fingerprint"] = lambda _manifest: None  # there is no AITER here
    if mode == "wrong_rank":
        vars(loader)["rank_of"] = lambda _parallel, manifest: manifest.target["ranks"][-1]

    def place_and_undo(folder: Path, layers: Sequence[Any], version: str, **options: Any) -> None:
        place(folder, layers, version, **options)
        for layer in layers:
            if mode == "wrong_flag":
                layer.module.w2_weight.is_shuffled = False
            if mode != "none":
                _undo(layer)
        vars(loader)["check_placed"] = lambda _layer: None  # flags are gone by now

    vars(loader)["place"] = place_and_undo


def _undo(layer: Any) -> None:
    """Brings the tensors of a layer back into rows, by what their flags say."""
    import torch

    from aiter_prep.layouts.table import layout_named

    for leaf in layer.tensors:
        held = getattr(layer.module, leaf)
        if getattr(held, "is_shuffled", False):
            stored = held.data.view(torch.uint8)
            rows = layout_named(held.aiter_prep_layout).invert(stored.numpy())
            stored.copy_(torch.from_numpy(rows))
            held.is_shuffled = False
