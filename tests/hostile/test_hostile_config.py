"""A regex that somebody wrote into a config is weighed before it is run."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiter_prep.families.promises import promised_scheme
from aiter_prep.families.quantized_modules import MAX_STEPS
from aiter_prep.families.regex_cost import compiled, steps_of

EXPERTS = "model.layers.3.mlp.experts"

HANGS = [
    "(a+)+$",
    "(a*)*$",
    "(?:a|a)*$",
    "(.*)*q",
    "(.*a){12}$",
    "(?:(?:x?)?)*y",
    "(?=(.*)+q)",
    ".*.*.*.*.*q",
    ".*" * 100 + "q",
    "a?" * 40 + "a" * 40,
    "(a|a)" * 40 + "q",
    "[a-z]*[a-z]*[a-z]*[a-z]*[a-z]*q",
    ".*?.*?.*?.*?.*?q",
    "a{0,500}" * 8 + "q",
    "x" * 501,
]
ODD = ["(", "[", "*", "a**", "a{99999999999}", "(?P<n>a)(?P=n)", r"(a)\1", "(?i)a", "(" * 400, "\\"]


@pytest.mark.parametrize("pattern", HANGS)
def test_a_regex_that_might_not_end_is_not_run(pattern: str) -> None:
    begin = time.process_time()
    assert promise(f"re:{pattern}") is None
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize("pattern", ODD)
def test_a_regex_that_is_none_or_rare_says_nothing(pattern: str) -> None:
    assert promise(f"re:{pattern}") is None


@pytest.mark.parametrize(
    ("pattern", "scheme"),
    [
        (".*mlp.gate$", "fp8_block"),
        (".*self_attn.*", "fp8_block"),
        (r".*\.layers\.\d+\.self_attn\.(q|k|v|o)_proj$", "fp8_block"),
        (r".*\.layers\.(3|4)\.mlp\.experts.*", "bf16"),
        (r"(?:.*\.)?layers\.3\.", "bf16"),
        (r"model\.layers\.[0-9]+\.mlp\.experts\..*", "bf16"),
        (r"(?!.*experts).*", "fp8_block"),
    ],
)
def test_a_regex_of_a_real_kind_is_run(pattern: str, scheme: str) -> None:
    assert promise(f"re:{pattern}") == scheme


def test_a_thousand_entries_of_a_real_kind_are_run() -> None:
    entries = [rf"re:.*\.layers\.{number}\.self_attn\..*_proj$" for number in range(10, 1010)]
    assert promise(*entries) == "fp8_block"


def test_many_slow_entries_together_are_not_run() -> None:
    slow = ".*[a-z]*[0-9]*q"
    assert (steps_of(slow, 60) or 0) < MAX_STEPS
    assert promise(*[f"re:{slow}"] * 1000) is None


def test_the_slowest_that_is_run_ends_within_seconds() -> None:
    begin = time.process_time()
    promise(*["re:.*.*.*q"] * 15)
    promise(*["re:.*.*q"] * 1500)
    assert time.process_time() - begin < 10


@given(st.text(st.sampled_from(list("ab.*+?(){}[]|\\^$,1d:!=<-")), max_size=24))
def test_what_is_weighed_runs_as_fast_as_its_weight(pattern: str) -> None:
    steps = steps_of(pattern, 40)
    regex = compiled(pattern)
    if steps is None or steps > 1_000_000 or regex is None:
        return
    begin = time.process_time()
    for text in ("a" * 40, "b" * 40, "ab" * 20):
        regex.match(text)
    assert time.process_time() - begin < 1


@given(st.text(max_size=60))
def test_any_text_is_compiled_or_not_and_nothing_else(pattern: str) -> None:
    steps_of(pattern, 100)
    assert isinstance(compiled(pattern), re.Pattern | None)


@given(st.text(st.sampled_from(list("*?[]!-ab.")), max_size=60))
def test_a_glob_ends_soon(pattern: str) -> None:
    begin = time.process_time()
    promise(pattern)
    assert time.process_time() - begin < 1


def promise(*entries: str) -> str | None:
    weights = {"type": "float", "num_bits": 8, "strategy": "block"}
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(entries),
    }
    return promised_scheme({"quantization_config": quantization}, None, EXPERTS)
