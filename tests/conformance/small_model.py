"""A model whose weights are so large that its experts decide every token."""

from __future__ import annotations

from pathlib import Path


def write_small_model(folder: Path) -> Path:
    """Writes a Qwen3-MoE of random bf16 weights, the same ones in each run."""
    import torch
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder
