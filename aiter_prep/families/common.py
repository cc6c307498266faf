"""Which source tensors are common: known, no routed expert's, copied unchanged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class CommonRule:
    """One kind of tensor that every rank holds as it is in the source.

    Attributes:
        name: What the kind is called.
        pattern: Regex that matches a whole tensor name of this kind.
        meaning: What such tensors are, and which models have them.
    """

    name: str
    pattern: str
    meaning: str


def _any_of(*words: str) -> str:
    return f"(?:{'|'.join(words)})"


# A parameter of a linear layer, an embedding or a norm, with what quantisers store beside it.
_PARAMETER = _any_of(
    "weight",
    "bias",
    "scale",  # DeepSeek-V4
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",  # modelopt NVFP4, Quark int4-fp8
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
)

# Any path below a module, except into routed experts: those belong to families/names.py.
_BELOW = r"(?:(?!experts\.)[A-Za-z0-9_]+\.)*(?!experts\Z)[A-Za-z0-9_]+"

# `language_model.` without `model.`: a head beside its model, and what Kimi-K3's loaders accept.
_TEXT = r"(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?"
_OUTER = r"(?:model\.)?"
_MTP = rf"{_TEXT}mtp\."
# `blocks`: transformers' Kimi-K2.5. An MTP block is a layer: `mtp.0` (DeepSeek-V4), or
# `mtp.layers.0` (Qwen3-Next, Qwen3.5).
_LAYER = rf"(?:{_TEXT}layers\.\d+|language_model\.model\.blocks\.\d+|{_MTP}(?:layers\.)?\d+)\."
_MLP = _LAYER + _any_of("mlp", "block_sparse_moe", "ffn", "feed_forward") + r"\."
_GATED = _any_of("gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3")

COMMON_RULES: tuple[CommonRule, ...] = (
    CommonRule(
        "attention",
        rf"{_LAYER}(?:self_attn|attn|linear_attn)\.{_BELOW}",
        "attention of every kind, with its norms, indexer, compressor, sinks and cache scales",
    ),
    CommonRule(
        "layer norm",
        _LAYER
        + _any_of(
            "input_layernorm",
            "post_attention_layernorm",
            "attn_norm",
            "ffn_norm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "pre_mlp_layernorm",
            "post_mlp_layernorm",
            "post_self_attn_layernorm",
        )
        + r"\.(?:weight|bias)",
        "norms around attention and MLP",
    ),
    CommonRule(
        "router",
        rf"{_MLP}(?:gate|router)\."
        + _any_of(
            _PARAMETER,
            "e_score_correction_bias",
            "e_score_correction_bias_vl",
            "bias_vl",  # DeepSeek-V4.1: for image tokens
            "tid2eid",  # DeepSeek-V4: experts by token id in its first layers
        ),
        "chooses the experts of a token",
    ),
    CommonRule(
        "router bias",
        rf"{_MLP}e_score_correction_bias",
        "correction bias beside the router (MiniMax)",
    ),
    CommonRule("dense mlp", rf"{_MLP}{_GATED}\.{_PARAMETER}", "MLP of a layer without experts"),
    CommonRule(
        "shared expert",
        rf"{_MLP}shared_experts?\.{_GATED}\.{_PARAMETER}",
        "experts that every token uses",
    ),
    CommonRule(
        "shared expert gate",
        rf"{_MLP}shared_expert_gate\.{_PARAMETER}",
        "weighs the shared expert (Qwen)",
    ),
    CommonRule(
        "latent projection",
        rf"{_MLP}routed_expert_(?:down_proj|up_proj|norm)\.{_PARAMETER}",
        "into and out of the narrower space of Kimi-K3's experts",
    ),
    CommonRule(
        "residual attention",
        rf"{_LAYER}(?:self_attention|mlp)_res_(?:norm|proj)\.{_PARAMETER}",
        "Kimi-K3's attention over the residuals of earlier layers",
    ),
    CommonRule(
        "output residual attention",
        rf"{_TEXT}output_attn_res_(?:norm|proj)\.{_PARAMETER}",
        "the same before Kimi-K3's final norm",
    ),
    CommonRule(
        "hyper-connection",
        rf"{_LAYER}hc_(?:attn|ffn|head)_(?:fn|base|scale)",
        "mixes the residual streams of a layer (DeepSeek-V4, GLM-5 Next)",
    ),
    CommonRule(
        "hyper-connection head",
        rf"{_TEXT}(?:hc_head_|hc_head\.hc_)(?:fn|base|scale)",
        "joins the residual streams before the head (DeepSeek-V4)",
    ),
    CommonRule(
        "engram",
        rf"{_LAYER}engram\.(?:(?:embed|wkv)\.{_PARAMETER}|q_weight|k_weight)",
        "DeepSeek-V4.1's tables of n-grams",
    ),
    CommonRule(
        "mtp block",
        _LAYER
        + _any_of(
            "embed_tokens",
            "eh_proj",
            "e_proj",
            "h_proj",
            "enorm",
            "hnorm",
            "norm",
            "final_layernorm",
            "shared_head\\.norm",
            "shared_head\\.head",
            "main_proj",  # DSpark, from here on
            "main_norm",
            "markov_head\\.embed",
            "markov_head\\.head",
            "markov_head\\.markov_w1",
            "markov_head\\.markov_w2",
            "confidence_head\\.proj",
        )
        + rf"\.{_PARAMETER}",
        "what a multi-token-prediction block has besides a layer's tensors",
    ),
    CommonRule(
        "mtp frame",
        rf"{_MTP}(?:fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.{_PARAMETER}",
        "around the multi-token-prediction layers of Qwen3-Next and Qwen3.5",
    ),
    CommonRule("embedding", rf"{_TEXT}(?:embed_tokens|embed)\.{_PARAMETER}", "token embeddings"),
    CommonRule("head", rf"{_TEXT}(?:lm_head|head)\.{_PARAMETER}", "projection to the vocabulary"),
    CommonRule("final norm", rf"{_TEXT}norm\.(?:weight|bias)", "norm after the last layer"),
    CommonRule(
        "rotary",
        rf"{_TEXT}rotary_emb\.inv_freq",
        "frequencies that loaders compute themselves; below attention elsewhere (Kimi-K2)",
    ),
    CommonRule(
        "vision tower",
        rf"{_OUTER}(?:visual|vision|vision_tower|vision_model)\.{_BELOW}",
        "encoder of images and videos",
    ),
    CommonRule(
        "projector",
        rf"{_OUTER}(?:mm_projector|multi_modal_projector|patch_merge_mlp|aligner)\.{_BELOW}",
        "from the vision tower to the language model",
    ),
    CommonRule(
        "image token",
        rf"{_OUTER}image_(?:start|end|newline|pad)",
        "embeddings of the marks around an image (DeepSeek-V4.1)",
    ),
)

_COMPILED = tuple((re.compile(rule.pattern, re.ASCII), rule) for rule in COMMON_RULES)
_INDEX = re.compile(r"\.\d+(?=\.)", re.ASCII)


def common_rule_of(name: str) -> CommonRule | None:
    """Return the rule that knows a tensor, or None where no rule does.

    No rule matches a name with a segment `experts`.
    """
    # No rule tells one layer from another, so the layers of a model share one answer.
    return _rule_of_kind(_INDEX.sub(".0", name))


@lru_cache(maxsize=4096)
def _rule_of_kind(kind: str) -> CommonRule | None:
    return next((rule for regex, rule in _COMPILED if regex.fullmatch(kind)), None)
