"""Values of traits that choose a path under more than one target."""

from __future__ import annotations

from aiter_prep.targets.model import DEFAULT

# `model_type` of the language model
DEEPSEEK_V4 = frozenset({"deepseek_v4", "deepseek_v41", "deepseek_v41_text"})
DEEPSEEK_V41 = frozenset({"deepseek_v41", "deepseek_v41_text"})
KIMI_K3 = frozenset({"kimi_k3", "kimi_linear"})
MINIMAX_M3 = frozenset({"minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"})

# families with a tensor for each projection of each expert
PER_PROJECTION = frozenset({"gate_up_down", "w1_w2_w3"})

AITER_BACKEND = frozenset({DEFAULT, "auto", "aiter"})
INTERLEAVED = frozenset({DEFAULT, "interleaved"})
SEPARATED = frozenset({DEFAULT, "separated"})
