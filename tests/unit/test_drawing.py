"""Drawings of layouts: every byte is in its place, for people and for documents."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from aiter_prep.cli.app import run
from aiter_prep.layouts.drawing import MAX_CELLS, draw, svg
from aiter_prep.layouts.table import LAYOUTS, layout_named
from aiter_prep.targets.table import TARGETS

SVG = "{http://www.w3.org/2000/svg}"
NAMES = sorted(LAYOUTS)


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_says_where_the_layout_puts_every_byte(name: str) -> None:
    drawing = draw(layout_named(name))
    # of a matrix of more than 256 bytes, the low and the high half of each number in turn
    numbers = np.arange(drawing.total_bytes).reshape(drawing.rows, drawing.row_bytes)
    low = layout_named(name).apply((numbers % 256).astype(np.uint8)).ravel()
    high = layout_named(name).apply((numbers // 256).astype(np.uint8)).ravel()
    stored = low.astype(np.int64) + 256 * high.astype(np.int64)
    seen = np.zeros(drawing.total_bytes, np.int64)
    for line in drawing.cells:
        for cell in line:
            part = numbers[cell.rows.start : cell.rows.stop, cell.columns.start : cell.columns.stop]
            assert stored[cell.start : cell.stop].tolist() == part.ravel().tolist()
            seen[cell.start : cell.stop] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_small_enough_to_look_at(name: str) -> None:
    assert 1 <= sum(map(len, draw(layout_named(name)).cells)) <= MAX_CELLS


def test_rows_of_an_interleaved_layout_are_called_gate_and_up() -> None:
    drawing = draw(layout_named("tile_16x16_interleaved_16"))
    labels = [drawing.row_label(line[0].rows) for line in drawing.cells]
    assert labels == ["gate 0-15", "gate 16-31", "up 0-15", "up 16-31"]
    assert [line[0].start for line in drawing.cells] == [0, 1024, 512, 1536]


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_has_a_rectangle_for_each_cell_and_cuts_nothing_off(name: str) -> None:
    drawing = draw(layout_named(name))
    picture = ET.fromstring(svg(drawing))  # noqa: S314 - our own
    width, height = (float(picture.attrib[side]) for side in ("width", "height"))
    rectangles = picture.findall(f"{SVG}rect")
    assert len(rectangles) == 1 + sum(map(len, drawing.cells))
    for rectangle in rectangles[1:]:
        assert float(rectangle.attrib["x"]) + float(rectangle.attrib["width"]) <= width
        assert float(rectangle.attrib["y"]) + float(rectangle.attrib["height"]) <= height
    for text in picture.findall(f"{SVG}text"):
        if text.attrib["text-anchor"] == "start":
            assert float(text.attrib["x"]) + 8 * len(text.text or "") <= width


def test_layouts_show_draws_a_tile_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layouts", "show", "tile_16x16"], owns_process=False) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "row 16-31   512-767     768-1023\n" in said
    assert "AITER: shuffle_weight(x, (16, 16))" in said


def test_layouts_show_writes_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "e8m0.svg"
    assert run(["layouts", "show", "e8m0", "--svg", str(picture)], owns_process=False) == 0
    assert str(picture) in capsys.readouterr().err
    assert ET.fromstring(picture.read_text("utf-8")).tag == f"{SVG}svg"  # noqa: S314


def test_layouts_show_says_when_it_cannot_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        run(
            ["layouts", "show", "e8m0", "--svg", str(tmp_path / "no" / "e8m0.svg")],
            owns_process=False,
        )
        == 1
    )
    assert "cannot write" in capsys.readouterr().err


def test_layouts_show_has_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layouts", "show", "tile_16x16", "--json"], owns_process=False) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "aiter-prep/layouts-show/1"
    assert document["cells"][1] == {"rows": [0, 16], "columns": [16, 32], "storage": [256, 512]}


def test_layouts_show_refuses_a_layout_that_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["layouts", "show", "tile_8x8"], owns_process=False) == 11
    assert "known layouts" in capsys.readouterr().err


def test_layouts_lists_every_path_of_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layouts", "--json"], owns_process=False) == 0
    document = json.loads(capsys.readouterr().out)
    listed = {name: len(target["paths"]) for name, target in document["targets"].items()}
    assert listed == {name: len(target.paths) for name, target in TARGETS.items()}
