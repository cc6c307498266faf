"""Holds every backend to the bytes of `cpu`: call by call, and over whole conversions."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from aiter_prep.backends import lanes
from aiter_prep.backends.aiter_package import Aiter, functions_of
from aiter_prep.backends.aiter_rocm import CALLS, AiterBackend
from aiter_prep.backends.choices import DEFAULT_DEVICE_MEMORY
from aiter_prep.backends.cpu import CpuBackend
from aiter_prep.backends.probe import probe
from aiter_prep.backends.slices import Slice, cut
from aiter_prep.backends.table import Backend, PlacedPart, choose_backend
from aiter_prep.errors import NoRule
from aiter_prep.execution import execute
from aiter_prep.layouts.permutation import REST, Layout
from aiter_prep.layouts.table import LAYOUTS
from aiter_sources import modules_of_aiter, sources
from prepared import contents, plan_of
from support import FIXTURES, fixture

Bytes = npt.NDArray[np.uint8]
SHUFFLING = [name for name, layout in LAYOUTS.items() if layout.order != (0, 1)]
SHAPES = ("whole", "two parts", "two slices", "columns", "every other row", "padded")
EXPERTS, TILES = 3, 4
TARGETS = ("aiter", "vllm@0.33")


def random_bytes(shape: tuple[int, ...], seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def call(layout: Layout, shape: str, row_bytes: int = 128) -> tuple[list[PlacedPart], Bytes]:
    """Return parts as writers cut them out of what they read, and the buffer to lay them out in."""
    rows = TILES * layout.row_multiple()
    stored = np.full((EXPERTS, rows, row_bytes), 0x7F, np.uint8)
    half = rows // 2
    if shape == "whole":
        return [(random_bytes(stored.shape), 0, 0)], stored
    if shape == "two parts":
        one, two = (random_bytes((EXPERTS, half, row_bytes), seed) for seed in (1, 2))
        return [(one, 0, 0), (two, half, 0)], stored
    if shape == "two slices":  # of a rank: rows of larger matrices
        one, two = (random_bytes((EXPERTS, 3 * rows, row_bytes), seed) for seed in (1, 2))
        return [(one[:, half:rows], 0, 0), (two[:, rows : rows + half], half, 0)], stored
    if shape == "columns":  # of a rank: columns of a larger matrix
        wide = random_bytes((2 * EXPERTS, rows, 3 * row_bytes))
        return [(wide[::2, :, row_bytes : 2 * row_bytes], 0, 0)], stored
    if shape == "every other row":
        both = random_bytes((EXPERTS, rows, row_bytes))
        return [(both[:, ::2], 0, 0), (both[:, 1::2], half, 0)], stored
    assert shape == "padded", shape
    small = random_bytes((EXPERTS, half - 1, row_bytes - 5))
    return [(small, 0, 0), (small[:, :3], half, 0)], stored


def check_call(backend: Backend, layout: Layout, shape: str, row_bytes: int = 128) -> None:
    """Check that a backend brings the bytes of `cpu`."""
    parts, wanted = call(layout, shape, row_bytes)
    found = wanted.copy()
    CpuBackend().lay_out(layout, parts, wanted)
    backend.lay_out(layout, parts, found)
    assert np.array_equal(found, wanted)


@cache
def aiter_on_cpu() -> AiterBackend:
    """Return AITER's own functions as a backend, from its source files."""
    import torch

    folder = sources()
    found = Aiter(functions_of(modules_of_aiter(folder)), "sources", None, str(folder))
    return AiterBackend(torch, torch.device("cpu"), DEFAULT_DEVICE_MEMORY, found)


def needs(backend: AiterBackend, layouts: list[str]) -> None:
    """Skip what AITER's sources here are too old for."""
    missing = {n for name in layouts if name in CALLS for n in CALLS[name].needs}
    missing -= backend._aiter.functions.keys()
    if missing:
        pytest.skip(f"the AITER here is too old to have {', '.join(sorted(missing))}")


# --- call by call -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_cpu_lays_out_as_the_layout_says(name: str) -> None:
    for shape in SHAPES:
        parts, stored = call(LAYOUTS[name], shape)
        wanted = stored.copy()
        for part, row, column in parts:
            wanted[:, row : row + part.shape[1], column : column + part.shape[2]] = part
        CpuBackend().lay_out(LAYOUTS[name], parts, stored)
        assert np.array_equal(stored, LAYOUTS[name].apply(wanted)), shape


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_brings_the_bytes_of_cpu(name: str, shape: str) -> None:
    backend, _ = choose_backend("torch", "cpu")
    for row_bytes in (64, 128, 192):
        check_call(backend, LAYOUTS[name], shape, row_bytes)


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SHUFFLING)
def test_aiters_own_functions_bring_the_bytes_of_cpu(name: str, shape: str) -> None:
    backend = aiter_on_cpu()
    needs(backend, [name])
    for row_bytes in (64, 128, 192):
        check_call(backend, LAYOUTS[name], shape, row_bytes)


def test_every_layout_that_moves_bytes_has_a_call_of_aiter() -> None:
    assert set(CALLS) == set(SHUFFLING)


@settings(max_examples=60)
@given(st.data())
@pytest.mark.parametrize("name", LAYOUTS)
def test_laying_out_every_slice_lays_out_the_whole(name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    parts, wanted = call(layout, data.draw(st.sampled_from(SHAPES)))
    found = wanted.copy()
    most_bytes = data.draw(st.integers(1, found.nbytes + 1))
    CpuBackend().lay_out(layout, parts, wanted)
    tile_bytes = layout.row_multiple() * found.shape[2]
    for piece in cut(layout, Slice(tuple(parts), found), most_bytes):
        if layout.order[0] == layout.rows.index(REST):
            assert piece.stored.nbytes <= max(most_bytes, tile_bytes)
        CpuBackend().lay_out(layout, piece.parts, piece.stored)
    assert np.array_equal(found, wanted)


# --- whole conversions --------------------------------------------------------------------------


def convert(source: Path, out: Path, backend: Backend, **options: Any) -> dict[str, str]:
    """Convert, and return the digest of every file but the manifest, which is checked here."""
    manifest = execute(plan_of(source, **options), out, backend=backend, workers=2)
    assert manifest.created_by["backend"] == backend.name
    found = contents(out)
    document = json.loads((out / "aiter_prep.json").read_text("utf-8"))
    del document["created_by"], document["self_digest"]
    found["aiter_prep.json"] = json.dumps(document, sort_keys=True)
    return found


def check_conversion(backend: Backend, source: Path, folder: Path, **options: Any) -> list[str]:
    """Check that a backend writes the files of `cpu`; return the layouts that were in use."""
    wanted = convert(source, folder / "cpu", CpuBackend(), **options)
    assert convert(source, folder / backend.name, backend, **options) == wanted
    return list(json.loads(wanted["aiter_prep.json"])["layouts"])


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


@pytest.mark.torch
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FIXTURES)
def test_every_fixture_is_converted_alike_by_torch_and_cpu(
    tmp_path: Path, name: str, target: str
) -> None:
    backend, _ = choose_backend("torch", "cpu")
    convert_if_planned(backend, fixture(name), tmp_path, target)


@pytest.mark.torch
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FIXTURES)
def test_every_fixture_is_converted_alike_by_aiters_own_functions_and_cpu(
    tmp_path: Path, name: str, target: str
) -> None:
    convert_if_planned(aiter_on_cpu(), fixture(name), tmp_path, target)


def convert_if_planned(backend: Backend, source: Path, folder: Path, target: str) -> None:
    """Convert for two ranks, or for whichever number the target takes."""
    for tp in (2, 1):
        if is_planned(source, tp, target):
            check_conversion(backend, source, folder, tp=tp, target=target)
            return
    assert target != "aiter", "our own target takes every fixture"


def is_planned(source: Path, tp: int, target: str) -> bool:
    try:
        plan_of(source, tp, target=target)
    except NoRule:
        return False
    return True


@pytest.mark.torch
@pytest.mark.parametrize("name", tiny.SAMPLES)
def test_every_scheme_is_converted_alike_by_all_backends(tmp_path: Path, name: str) -> None:
    model, plain, padding = tiny.SAMPLES[name]
    source = tiny.write(tmp_path / "source", model)
    torch_on_cpu, _ = choose_backend("torch", "cpu")
    for tp in sorted({plain, padding or plain}):
        check_conversion(torch_on_cpu, source, tmp_path / f"torch {tp}", tp=tp)
        check_conversion(aiter_on_cpu(), source, tmp_path / f"aiter {tp}", tp=tp)


# --- on a GPU -----------------------------------------------------------------------------------


@cache
def gpu() -> Backend:
    backend, _ = choose_backend("torch", "cuda:0", device_memory=256_000_000)
    return backend


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpu_brings_the_bytes_of_cpu(name: str, shape: str) -> None:
    for row_bytes in (64, 192, 8192):
        check_call(gpu(), LAYOUTS[name], shape, row_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tile_16x16", "tile_16x16_interleaved_1", "e8m0"])
def test_a_gpu_brings_the_bytes_of_cpu_for_more_than_its_lanes_hold(name: str) -> None:
    layout = LAYOUTS[name]
    parts = [(random_bytes((9, 64 * layout.row_multiple(), 16384)), 0, 0)]
    assert parts[0][0].nbytes > 3 * lanes.LANE_BYTES
    stored = gpu().buffer(parts[0][0].nbytes).reshape(parts[0][0].shape)
    for _ in range(3):
        stored[...] = 0
        gpu().lay_out(layout, parts, stored)
        assert np.array_equal(stored, layout.apply(parts[0][0]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FIXTURES)
def test_every_fixture_is_converted_alike_by_a_gpu_and_cpu(tmp_path: Path, name: str) -> None:
    convert_if_planned(gpu(), fixture(name), tmp_path, "aiter")


@pytest.mark.gpu
def test_a_probe_of_a_gpu_finds_our_bytes() -> None:
    probe(gpu()).require()


def test_the_fingerprint_of_our_layouts_is_the_one_of_the_format() -> None:
    """A change of a layout, or of the probe, would make older manifests' fingerprints useless."""
    found = probe(CpuBackend())
    assert found.theirs == found.ours == "xxh3-128:53ca3dba81a269b5deb092697d8b5f9f"
