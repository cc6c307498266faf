"""An address or an empty name is never taken for a local folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aiter_prep import execute, restore, verify
from aiter_prep.cli import main
from aiter_prep.errors import InvalidUsage
from aiter_prep.execution import Part, execute_part, seal
from prepared import plan_of, small

CALLS = {
    "convert": ["convert", "source", "PLACE", "--tp", "1"],
    "a dry run": ["convert", "source", "PLACE", "--tp", "1", "--dry-run"],
    "a part": ["convert", "source", "PLACE", "--tp", "1", "--part", "1/1"],
    "several": ["convert", "source", "PLACE", "--tp", "1", "--tp", "2"],
    "restore": ["restore", "out", "PLACE"],
    "restore from": ["restore", "PLACE", "back"],
    "verify": ["verify", "PLACE"],
    "inspect": ["inspect", "PLACE"],
    "push": ["push", "PLACE", "org/name"],
    "seal": ["seal", "PLACE"],
    "demo": ["demo", "PLACE"],
    "a log": ["verify", "out", "--log-file", "PLACE"],
    "sums": ["verify", "out", "--sha256sums", "PLACE"],
    "a page": ["inspect", "out", "--html", "PLACE"],
    "a picture": ["inspect", "out", "--plot", "PLACE"],
    "a drawing": ["layouts", "show", "tile_16x16", "--svg", "PLACE"],
}
WRITERS = ("convert", "a dry run", "a part", "several", "restore", "demo")
SOURCES = {
    "convert": ["convert", "PLACE", "new", "--tp", "1"],
    "verify": ["verify", "out", "--source", "PLACE"],
    "seal": ["seal", "out", "--source", "PLACE"],
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a source and a folder prepared from it."""
    small(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(call: list[str], place: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main([place if word == "PLACE" else word for word in call])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("name", CALLS)
def test_an_address_makes_no_local_folder(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = sorted(place.iterdir())
    for address in ("s3://b/f", "gs://b/f.svg", "HF://org/name", "file:///tmp/x"):
        code, err = said(CALLS[name], address, capsys)
        assert code == 2
        assert f"is the address `{address}`, and must be a local path" in err
        assert ("--push" in err) == (name in WRITERS)
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize("name", [*CALLS, *(f"source of {name}" for name in SOURCES)])
def test_an_empty_name_is_not_the_current_folder(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = sorted(place.iterdir())
    call = SOURCES[name[10:]] if name.startswith("source of ") else CALLS[name]
    code, err = said(call, "", capsys)
    assert code == 2
    assert "is empty" in err
    assert "a shell variable that is not set" in err
    assert sorted(place.iterdir()) == before


FUNCTIONS: dict[str, Callable[[Path, str], object]] = {
    "execute": lambda source, place: execute(plan_of(source), place),
    "execute_part": lambda source, place: execute_part(plan_of(source), place, Part(1, 1)),
    "seal": lambda _, place: seal(place),
    "restore": lambda _, place: restore("out", place),
    "verify": lambda _, place: verify(place),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("text", ["", "s3://b/f"])
def test_a_function_takes_no_address_and_no_empty_name(place: Path, name: str, text: str) -> None:
    before = sorted(place.iterdir())
    with pytest.raises(InvalidUsage, match=r"is empty|is the address"):
        FUNCTIONS[name](place / "source", text)
    assert sorted(place.iterdir()) == before
