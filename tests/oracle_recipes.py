"""What each engine does with experts of each scheme, in the words of `oracle_engines.Recipe`.

Written from the documents of the engines, not from the package's tables.
"""

from __future__ import annotations

from dataclasses import replace

from oracle_engines import BYTES, E8M0, Recipe

_FP4 = ("U8", "float4_e2m1fn_x2")
_F32 = ("F32", "float32")
_BF16 = Recipe(intermediate=128, small=(192, 64))
_A16W4 = Recipe(
    intermediate=128,
    hidden=128,
    by_16=True,
    weight=_FP4,
    scale=("e8m0_by_16", "e8m0_unpadded"),
    scale_dtype=BYTES,
    shape="folded",
)
_SEPARATED = Recipe(
    intermediate=256,
    hidden=256,
    weight=_FP4,
    scale=("e8m0", "e8m0"),
    scale_dtype=E8M0,
    shape="folded",
)
_MXFP8 = Recipe(by_16=True, scale=("e8m0_by_16", "e8m0"), scale_dtype=BYTES, shape="folded")
_W4A4 = Recipe(
    weight=_FP4, scale=("e8m0", "e8m0"), scale_dtype=BYTES, intermediate=128, hidden=256, fill=1
)
_STRIDED = Recipe(intermediate=128, stride=True, scale_dtype=_F32)

_RECIPES: dict[str, dict[str, Recipe]] = {
    "aiter": {
        "plain": _BF16,
        "block": Recipe(),
        "channel": Recipe(),
        "tensor": Recipe(name="largest"),
        "mxfp4": _SEPARATED,
        "mxfp8": Recipe(scale=("e8m0", "e8m0"), scale_dtype=E8M0, shape="folded"),
    },
    "vllm": {
        "plain": _BF16,
        "block": Recipe(scale_dtype=_F32),
        "channel": Recipe(scale_dtype=_F32),
        "tensor": Recipe(),
        "mxfp4": _A16W4,
        "mxfp8": _MXFP8,
        "int4": Recipe(),
    },
    "sglang": {
        "plain": Recipe(),
        "block": replace(_STRIDED, name="weight_scale_inv"),
        "channel": Recipe(scale_dtype=_F32),
        "tensor": Recipe(every_row=True),
        "mxfp4": replace(_A16W4, hidden=1, scale_dtype=E8M0, name="weight_scale_inv"),
        "mxfp8": replace(_MXFP8, name="weight_scale_inv"),
    },
    "atom": {
        "plain": Recipe(),
        "block": Recipe(scale_dtype=_F32, name="weight_scale"),
        "channel": Recipe(scale_dtype=_F32),
        "tensor": Recipe(through_f16=False),
        "mxfp4": replace(_SEPARATED, scale_dtype=BYTES, name="weight_scale"),
        "mxfp8": Recipe(
            intermediate=256,
            by_16=True,
            scale=("e8m0_by_16", "e8m0_unpadded"),
            scale_dtype=E8M0,
            shape="folded",
            name="weight_scale",
        ),
    },
}

_ATOM_128 = replace(_RECIPES["atom"]["mxfp4"], intermediate=128, hidden=128)
_SPECIAL: dict[tuple[str, str], dict[str, Recipe]] = {
    ("vllm", "kimi_k3"): {
        "mxfp4": replace(_A16W4, by_16=False, scale=("e8m0_unpadded", "e8m0"), scale_dtype=E8M0)
    },
    ("vllm", "quark"): {"mxfp4": _W4A4},
    ("sglang", "kimi_k3"): {"mxfp4": replace(_A16W4, intermediate=256, hidden=1, weight=BYTES)},
    ("sglang", "quark"): {
        "mxfp4": replace(_W4A4, intermediate=256, hidden=1, fill=0, weight=BYTES)
    },
    ("sglang", "compressed-tensors"): {"channel": _STRIDED},
    ("atom", "kimi_k3"): {"mxfp4": _ATOM_128},
    ("atom", "deepseek_v4"): {"mxfp4": _ATOM_128},
    ("atom", "quark"): {"channel": Recipe(scale_dtype=_F32, shape="rows")},
}


def recipes_for(target: str, special: str = "") -> dict[str, Recipe]:
    """Return the recipes of a target, some of them for a special method such as `quark`."""
    return {**_RECIPES[target], **_SPECIAL.get((target, special), {})}


def _on_gfx1250(recipe: Recipe, *, by_1: bool) -> Recipe:
    return replace(
        recipe,
        by_16=False,
        by_1=by_1,
        scale=("n32k4_by_1" if by_1 else "n32k4", "n32k4"),
        shape="row_blocks",
        scale_dtype=BYTES,
    )


GFX1250_RECIPES: dict[tuple[str, str], dict[str, Recipe]] = {
    ("sglang", "deepseek_v4"): {"mxfp4": _on_gfx1250(_RECIPES["sglang"]["mxfp4"], by_1=True)},
    ("sglang", "kimi_k25-quark"): {
        "mxfp4": _on_gfx1250(_SPECIAL["sglang", "quark"]["mxfp4"], by_1=True)
    },
    ("atom", "deepseek_v4"): {"mxfp4": _on_gfx1250(_ATOM_128, by_1=False)},
    ("atom", "minimax_m3-mxfp8"): {"mxfp8": _on_gfx1250(_RECIPES["atom"]["mxfp8"], by_1=True)},
}
