"""What `inspect` draws: a picture of where the bytes are, and a page about a prepared folder."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from PIL import Image, ImageChops, ImageColor

import tiny
from aiter_prep.cli import main
from aiter_prep.errors import InvalidUsage
from aiter_prep.inspection import inspect_path
from aiter_prep.inspection.chart import Row, chart, slots_of
from aiter_prep.inspection.measures import (
    PADDING,
    Measures,
    layer_of,
    measure_prepared,
    measure_source,
)
from aiter_prep.inspection.page import MAX_GROUPS, page
from aiter_prep.inspection.picture import COLOURS, Box, Picture, Text, svg
from aiter_prep.inspection.plot import plot_of
from aiter_prep.inspection.prepared import PreparedInspection, inspect_prepared
from aiter_prep.inspection.raster import png
from aiter_prep.inspection.serving import serving_lines
from aiter_prep.inspection.source import SourceInspection
from aiter_prep.manifest import read_manifest
from aiter_prep.storage.checkpoint import open_checkpoint
from prepared import prepare

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "\"><img src=x onerror=alert(1)>'`&amp;\u202e"
VOID = {"meta", "img", "br", "rect", "path"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny-moe"
    return tiny.write(folder, kind="mxfp4_quark", layers=3, hidden=256, intermediate=320)


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "tiny-moe-aiter-tp2-gfx950"
    prepare(source, out, 2)
    return out


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose model gives itself names that would run as HTML."""
    home = tmp_path_factory.mktemp("evil")
    made = tiny.write(home / EVIL, kind="bf16", config={"architectures": [f"<b>{EVIL}"]})
    prepare(made, home / f"<i>{EVIL}", 1)
    return home / f"<i>{EVIL}"


class Outline(HTMLParser):
    """Checks that elements close in order; collects names, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline_of(text: str) -> Outline:
    outline = Outline()
    outline.feed(text)
    outline.close()
    assert outline.open == []
    return outline


# --- the page -----------------------------------------------------------------------------------


def test_the_page_is_whole_and_fetches_nothing(folder: Path) -> None:
    text = page(folder)
    outline = outline_of(text)
    assert outline.names.isdisjoint({"script", "img", "link", "iframe", "object", "form", "base"})
    assert outline.attributes.isdisjoint({"src", "href", "srcset", "action", "data"})
    assert not any(name.startswith("on") for name in outline.attributes)
    assert "default-src 'none'" in text
    assert 'name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme: dark" in text
    assert "url(" not in text
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\"' ]*", text)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_tells_what_was_done(folder: Path) -> None:
    text = outline_of(page(folder)).text
    manifest = read_manifest(folder)
    for words in (
        "tiny-moe, prepared for aiter",
        "2 tensor-parallel ranks",
        "320, stored as 256 for each rank",
        "aiter-prep verify tiny-moe-aiter-tp2-gfx950",
        "aiter_prep.load('tiny-moe-aiter-tp2-gfx950', rank=0)",
        "aiter-prep restore tiny-moe-aiter-tp2-gfx950",
        "model.layers.{n}.mlp.experts.w13_weight",
        *(shard.digest for shard in manifest.shards),
        *(file.digest for file in manifest.files),
        *(layout for layout in manifest.layouts),
    ):
        assert words in text, words
    assert page(folder).count("<svg") == len(manifest.layouts)


def test_a_page_of_what_cannot_be_undone_says_so(tmp_path: Path) -> None:
    made = tiny.write(tmp_path / "source", kind="fp8_tensor")
    prepare(made, tmp_path / "out", 1, target="vllm", gfx="gfx942")
    text = outline_of(page(tmp_path / "out")).text
    assert "keep the source" in text
    assert "aiter-prep restore" not in text
    assert "VLLM_ROCM_USE_AITER=1 vllm serve out --load-format aiter_prep" in text


def test_no_name_of_a_model_becomes_html(evil: Path) -> None:
    text = page(evil)
    outline = outline_of(text)
    assert "img" not in outline.names
    assert text.count("<b>") == 4  # those of the tiles
    assert not any(name.startswith("on") for name in outline.attributes)
    assert "onerror=alert(1)" in outline.text
    assert "\u202e" not in text


def test_names_that_are_many_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiter_prep.inspection.page.MAX_GROUPS", 2)
    assert "more kinds of names" in page(folder)
    assert MAX_GROUPS > 2


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_page_scrolls_in_one_direction_only(folder: Path, tmp_path: Path, width: int) -> None:
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(page(folder))
    (tmp_path / "frame.html").write_text(
        f"""<body><iframe src="page.html" width="{width}" height="800" style="border:0"></iframe>
        <script>onload = () => {{
            const root = document.querySelector("iframe").contentDocument.documentElement;
            document.body.dataset.widths = root.clientWidth + " " + root.scrollWidth;
        }}</script>"""
    )
    arguments = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        "--virtual-time-budget=3000",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        f"file://{tmp_path / 'frame.html'}",
    )
    done = subprocess.run(
        [CHROMIUM, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found = re.search(r'data-widths="(\d+) (\d+)"', done.stdout)
    assert found is not None, done.stderr
    assert (int(found[1]), int(found[2])) == (width, width)


# --- the picture --------------------------------------------------------------------------------


def elements(text: str, tag: str) -> list[ET.Element]:
    return list(ET.fromstring(text).iter(f"{SVG}{tag}"))  # noqa: S314 - of our own making


def words_of(text: str) -> list[str]:
    return [element.text or "" for element in elements(text, "text")]


def test_the_picture_of_a_source_shows_roles_layers_and_padding(source: Path) -> None:
    text = svg(plot_of(inspect_path(source), source))
    words = words_of(text)
    for heading in ("Bytes by role", "Bytes by layer", "What conversions would write"):
        assert heading in words
    for label in ("expert weights", "expert scales", "0", "1", "2", "rest"):
        assert label in words
    assert any("padding" in word for word in words)
    assert any(word.startswith("aiter --tp 1") for word in words)


def test_the_picture_of_a_prepared_folder_shows_ranks(folder: Path) -> None:
    words = words_of(svg(plot_of(inspect_path(folder), folder)))
    assert {"rank 0", "rank 1", "all ranks", PADDING} <= set(words)


@pytest.mark.parametrize("layers", [1, 61, 400])
def test_everything_lies_within_the_picture(layers: int) -> None:
    sizes: dict[int | None, dict[str, int]] = {
        n: {"expert weights": 10 + n, "a role of its own": 1} for n in range(layers)
    }
    roles = {"expert weights": sum(s["expert weights"] for s in sizes.values()), "x": layers}
    measures = Measures(sizes, {**roles, "a role of its own": layers})
    text = svg(
        chart(
            "t" * 300, "below", measures, {"more": [Row("a" * 300, (("c0", 5), ("pad", 1)), "6 B")]}
        )
    )
    root = ET.fromstring(text)  # noqa: S314 - of our own making
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for rectangle in elements(text, "rect"):
        x, y = float(rectangle.get("x", 0)), float(rectangle.get("y", 0))
        assert x >= 0
        assert y >= 0
        assert x + float(rectangle.get("width", 0)) <= width + 1
        assert y + float(rectangle.get("height", 0)) <= height + 1
    assert all(float(element.get("y", 0)) <= height for element in elements(text, "text"))


def test_no_name_of_a_model_becomes_a_part_of_the_picture(evil: Path) -> None:
    text = svg(plot_of(inspect_path(evil), evil))
    assert {element.tag for element in ET.fromstring(text).iter()} <= {  # noqa: S314 - ours
        f"{SVG}{tag}" for tag in ("svg", "title", "style", "rect", "text")
    }


def numbers_below(text: str) -> list[tuple[str, float]]:
    soft = [e for e in elements(text, "text") if e.get("text-anchor") == "middle"]
    return [(e.text or "", float(e.get("x", 0))) for e in soft]


@pytest.mark.parametrize("layers", [1, 2, 24, 25, 61, 93, 400])
def test_the_numbers_of_layers_do_not_touch(layers: int) -> None:
    sizes: dict[int | None, dict[str, int]] = {n: {"expert weights": 1} for n in range(layers)}
    measures = Measures({**sizes, None: {"expert weights": 1}}, {"expert weights": layers + 1})
    labels = numbers_below(svg(chart("t", "", measures, {})))
    assert labels[0][0] == "0"
    assert labels[-1][0] == "rest"
    for (one, x), (other, next_x) in itertools.pairwise(labels):
        assert next_x - x > 7 * (len(one) + len(other)) / 2, (one, other)


def pixels_of(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def test_a_png_shows_the_boxes_where_they_are() -> None:
    boxes = (Box(10, 10, 20, 5, "c0"), Box(40, 10, 0.25, 5, "c4"), Box(50, 10, 0.01, 5, "c2"))
    found = pixels_of(png(Picture("t", 100, 50, boxes)))
    assert found.size == (200, 100)
    colours = {kind: ImageColor.getrgb(light) for kind, (light, _) in COLOURS.items()}
    inked = [p for p in itertools.product(range(200), range(100)) if is_of(found, p, colours["c0"])]
    assert (min(inked), max(inked), len(inked)) == ((20, 20), (59, 29), 40 * 10)
    assert is_of(found, (0, 0), colours["paper"])
    assert found.getpixel((80, 25)) not in {colours["paper"], colours["c4"]}  # a part of a pixel
    assert is_of(found, (100, 25), colours["paper"])  # too thin to be seen


def is_of(image: Image.Image, pixel: tuple[int, int], colour: object) -> bool:
    return bool(image.getpixel(pixel) == colour)


def test_a_png_writes_the_text_at_its_anchor() -> None:
    for anchor, edges in {"start": (99, 200), "middle": (50, 150), "end": (0, 101)}.items():
        found = pixels_of(png(Picture("t", 100, 50, (Text(50, 25, "mmm", "head", anchor),))))
        inked = ImageChops.invert(found).getbbox()
        assert inked is not None
        assert edges[0] <= inked[0] < inked[2] <= edges[1]
        assert 20 < inked[1] < inked[3] <= 52


def test_whatever_it_is_called_a_model_is_drawn(evil: Path) -> None:
    picture = plot_of(inspect_path(evil), evil)
    strange = replace(picture, shapes=(*picture.shapes, Text(0, 0, "\u6f22\x00\u202e\n")))
    data = png(strange)
    assert data == png(strange)
    assert pixels_of(data).size == (round(picture.width) * 2, round(picture.height) * 2)


def test_an_unfinished_folder_is_not_drawn(tmp_path: Path) -> None:
    (tmp_path / ".aiter_prep.journal").touch()
    with pytest.raises(InvalidUsage, match="unfinished"):
        plot_of(inspect_path(tmp_path), tmp_path)


# --- the numbers --------------------------------------------------------------------------------


def test_the_bytes_of_a_source_add_up(source: Path) -> None:
    measures, found = measure_source(open_checkpoint(source)), inspect_path(source)
    assert isinstance(found, SourceInspection)
    assert measures.total_bytes == found.total_bytes
    assert {role.replace(" ", "_"): n for role, n in measures.roles.items()} == found.roles
    assert sum(sum(roles.values()) for roles in measures.layers.values()) == found.total_bytes
    assert list(measures.layers) == [0, 1, 2, None]


def test_the_bytes_of_a_prepared_folder_add_up(folder: Path) -> None:
    manifest, found = read_manifest(folder), inspect_prepared(folder)
    measures = measure_prepared(manifest)
    assert measures.roles[PADDING] == found.padding_bytes > 0
    headers = sum(shard.size for shard in manifest.shards) - measures.total_bytes
    assert 0 < headers < 20_000 * len(manifest.shards)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.3.mlp.experts.5.w1", 3), ("lm_head.weight", None), ("a.٣.b", None)],
)
def test_a_tensor_is_of_the_first_layer_in_its_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_roles_have_colours_of_their_own_as_far_as_there_are_any() -> None:
    roles = ["expert weights", "expert scales", "attention", "router", "other", PADDING]
    assert len(set(slots_of(roles).values())) == len(roles)


# --- how to serve -------------------------------------------------------------------------------


def test_an_expert_parallel_folder_is_served_as_one(folder: Path) -> None:
    target = dict(inspect_prepared(folder).target)
    target |= {"engine": "vllm", "tp": 1, "ep": 4, "placement": "round_robin"}
    (line,) = serving_lines(target, "my folder")
    assert line == (
        "VLLM_ROCM_USE_AITER=1 vllm serve 'my folder' --load-format aiter_prep "
        "--tensor-parallel-size 4 --enable-expert-parallel --expert-placement-strategy round_robin"
    )


# --- the command --------------------------------------------------------------------------------


def test_the_command_writes_both_beside_what_it_says(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, html, painted = (tmp_path / name for name in ("a.svg", "a.html", "a.PNG"))
    arguments = ["inspect", str(folder), "--plot", str(plot), "--html", str(html), "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "prepared"
    assert plot.read_text() == svg(plot_of(inspect_path(folder), folder))
    assert html.read_text() == page(folder)
    assert main(["inspect", str(folder), "--plot", str(painted)]) == 0
    assert painted.read_bytes() == png(plot_of(inspect_path(folder), folder))
    assert isinstance(inspect_path(folder), PreparedInspection)


def test_a_png_without_pillow_names_the_extra(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "PIL" else real(n))
    assert main(["inspect", str(folder), "--plot", str(tmp_path / "a.png")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "aiter-prep[plot]" in said.err
    assert main(["inspect", str(folder), "--plot", str(tmp_path / "a.svg")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--plot", "a.jpg"], 2),
        (["--html", "a.svg"], 2),
        (["--html", "a.html"], 2),  # of a source
        (["--plot", "no/such/folder/a.svg"], 1),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(source), *arguments]) == code
    assert list(tmp_path.iterdir()) == []
