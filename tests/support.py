"""Where the small real checkpoints lie that the tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

FIXTURES: tuple[str, ...] = (
    "deepseek_v3-fp8_block-sharded",
    "deepseek_v4-fp4",
    "gpt_oss-mxfp4",
    "minimax_m3-mxfp8",
    "qwen3_moe-bf16",
    "qwen3_moe-ct-mxfp4",
    "qwen3_moe-fp8_block",
    "qwen3_moe-modelopt-fp8",
    "qwen3_moe-quark-mxfp4",
    "qwen3_moe-quark-ptpc_fp8",
)

_CHECKOUT = Path(__file__).resolve().parents[1]
# The checkpoints of up to 3 MB are part of the project; the others may lie beside the checkout.
_HOMES = (_CHECKOUT / "tests" / "fixtures", _CHECKOUT.parent / "shared" / "fixtures")


def fixture(name: str) -> Path:
    """The folder of the small checkpoint `name`; skips the test where it is not at hand."""
    assert name in FIXTURES, name
    for home in _HOMES:
        if (home / name).is_dir():
            return home / name
    return pytest.skip(f"checkpoint `{name}` is not at hand: it is too large for tests/fixtures")
