"""What SGLang 0.5.23 does not hold as AITER's kernels want it, or not from these bytes."""

from __future__ import annotations

from aiter_prep.targets.forms import GFX942, GFX950, GFX1250
from aiter_prep.targets.model import DEFAULT, Refusal, when
from aiter_prep.targets.traits import KIMI_K3, MINIMAX_M3, PER_PROJECTION

_SWIGLU_OAI = MINIMAX_M3 | KIMI_K3 | {"gpt_oss"}


def _refuse(
    scheme: str, reason: str, *, otherwise: bool = False, **traits: str | frozenset[str]
) -> Refusal:
    return Refusal(scheme, reason, when(**traits), otherwise)


_TRITON = "SGLang runs these experts with Triton, which reads them as they are"
REFUSALS = (
    _refuse(
        "bf16",
        "SGLang runs experts with SwiGLU-OAI or SiTU, which AITER's bf16 kernels do not know, with "
        "Triton",
        chip=GFX950,
        model=_SWIGLU_OAI,
    ),
    *(
        _refuse(scheme, _TRITON, method=method)
        for scheme, method in (
            ("fp8_block", "compressed-tensors"),
            ("fp8_tensor", frozenset({"compressed-tensors", "modelopt", "quark"})),
            ("int4", "compressed-tensors"),
        )
    ),
    _refuse(
        "fp8_block", "SGLang knows Quark's FP8 per tensor and per channel only", method="quark"
    ),
    _refuse(
        "mxfp8",
        "gfx942 has no MX matrix instructions: SGLang quantises the experts again in blocks of "
        "128 x 128, which loses precision",
        chip=GFX942,
    ),
    _refuse(
        "mxfp8",
        "SGLang runs MXFP8 experts with Triton unless its --moe-runner-backend is aiter; then use "
        "--moe-backend aiter",
        chip=GFX950,
        method=frozenset({"mxfp8", "modelopt"}),
        moe_backend=frozenset({DEFAULT, "auto"}),
    ),
    _refuse("mxfp8", "SGLang knows no such experts of its own", method="quark"),
    _refuse("mxfp8", "SGLang knows no such experts of its own", method="compressed-tensors"),
    _refuse("mxfp8", "on gfx1250 SGLang runs MXFP8 experts with Triton", chip=GFX1250),
    _refuse("mxfp4", "gfx942 has no MX matrix instructions", chip=GFX942),
    _refuse(
        "mxfp4",
        "SGLang takes configs of this method on gfx950 only",
        chip=GFX1250,
        method=frozenset({"mxfp4", "compressed-tensors"}),
    ),
    _refuse(
        "mxfp4",
        "on gfx1250 SGLang turns these experts into views of Triton's that are not contiguous",
        chip=GFX1250,
        method="quark",
        inputs="fp8_static",
    ),
    _refuse(
        "mxfp4",
        "SGLang 0.5.23 de-interleaves rows of gate and up which are not interleaved, which looks "
        "like a bug of the engine",
        otherwise=True,
        method="mxfp4",
        family=PER_PROJECTION,
    ),
    _refuse(
        "mxfp4",
        "SGLang has no kernel of AITER's for compressed-tensors MXFP4, but for Kimi-K3",
        otherwise=True,
        method="compressed-tensors",
    ),
    _refuse(
        "mxfp4",
        "SGLang adds biases that the checkpoint has not, and computes with gpt-oss's activation",
        method="quark",
        inputs="fp8_static",
        family=PER_PROJECTION,
    ),
    _refuse(
        "mxfp4",
        "SGLang's loader of gpt-oss finds no place for the biases",
        method="quark",
        inputs="fp4",
        family="gpt_oss_per_expert",
    ),
    _refuse(
        "mxfp4",
        "of Quark's MXFP4, SGLang knows FP4 and static FP8 activations only",
        otherwise=True,
        method="quark",
    ),
    _refuse(
        "int4_fp8",
        "SGLang makes such experts from bf16 ones while it loads, or from names of its own",
    ),
)
