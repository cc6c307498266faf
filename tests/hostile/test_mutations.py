"""The quick form of `scripts/mutation-test`: `verify` finds damage, `--source` forgery."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import mutations
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.verification import verify
from mutations import Mutation
from prepared import edit, small


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return small(tmp_path_factory.mktemp("mutations"))


def every(folder: Path) -> Iterator[Mutation]:
    rng = random.Random(7)
    yield from mutations.bit_flips(folder, 40, rng)
    yield from mutations.of_files(folder, rng)
    for fits in (False, True):
        yield from mutations.of_tensors(folder, fits=fits)
        fields = list(mutations.of_manifest(folder, fits=fits))
        yield from islice(rng.sample(fields, len(fields)), 40)


def test_every_mutation_is_found(made: tuple[Path, Path]) -> None:
    source, folder = made
    checkpoint = open_checkpoint(source)
    free = ("created_by.", "source.", "options.")
    for mutation in every(folder):
        if not (mutation.fits and mutation.what.startswith(free)):
            assert mutations.is_found(folder, mutation, checkpoint), mutation.what
    assert verify(folder, source=checkpoint).is_clean


@pytest.mark.parametrize("text", ["\n", " ", ""])
def test_a_manifest_that_says_the_same_in_other_words_is_found(
    text: str, made: tuple[Path, Path]
) -> None:
    path = made[1] / "aiter_prep.json"
    before = path.read_text("utf-8")
    path.write_text(before[:-1] + text + "\n" * (text == " "), "utf-8")
    found = verify(made[1]).is_clean
    path.write_text(before, "utf-8")
    assert found == (text == "\n")


def test_what_another_version_would_plan_is_not_held_against_a_folder(
    made: tuple[Path, Path],
) -> None:
    source, folder = made
    before = (folder / "aiter_prep.json").read_bytes()
    edit(folder, lambda document: document["created_by"].update(version="0.0.1"))
    edit(folder, lambda document: document["target"].update(engine_version="older"))
    assert verify(folder, source=open_checkpoint(source)).is_clean
    (folder / "aiter_prep.json").write_bytes(before)
