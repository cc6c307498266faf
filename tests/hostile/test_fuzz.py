"""The quick form of `scripts/fuzz`, and what its long form has found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import fuzzing
from prepared import load, sealed, small

FINDS = sorted((Path(__file__).parent / "finds").iterdir())
EXECUTIONS = 150


@pytest.mark.parametrize("find", FINDS, ids=[path.name for path in FINDS])
def test_what_was_found_once_is_refused_or_read(find: Path) -> None:
    fuzzing.TARGETS[find.name.partition("-")[0]](find.read_bytes())


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    document = load(small(tmp_path_factory.mktemp("fuzz"))[1])
    document["tensors"] = document["tensors"][:2]
    return [sealed(document)]


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_documents_of_honest_words_are_refused_or_read(target: str, manifests: list[bytes]) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(fuzzing.documents(target, manifests))
    def check(data: bytes) -> None:
        fuzzing.TARGETS[target](data)

    check()


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_lies_about_honest_inputs_are_refused_or_read(target: str, manifests: list[bytes]) -> None:
    honest = fuzzing.seeds(target, manifests)
    rng = random.Random(target)
    for data in honest:
        fuzzing.TARGETS[target](data)
    for _ in range(EXECUTIONS):
        fuzzing.TARGETS[target](fuzzing.mutated(rng.choice(honest), rng))
