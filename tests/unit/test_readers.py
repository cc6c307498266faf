"""Other packages read the same bytes as our own reader, and are missed by name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import prepared
import tiny
from aiter_prep.errors import AiterPrepError, DataMismatch, InvalidUsage

torch = pytest.importorskip("torch")

# these need torch
from aiter_prep.engines.plain import load  # noqa: E402
from aiter_prep.engines.readers import DIRECT, READERS  # noqa: E402

pytestmark = pytest.mark.torch

PACKAGES = {"fastsafetensors": "fastsafetensors", "runai_streamer": "runai_model_streamer"}
KINDS = ("mxfp4_quark", "bf16", "fp8_block_f32")


def installed(reader: str) -> Any:
    """A case for a reader, skipped where its package is missing."""
    missing = importlib.util.find_spec(PACKAGES[reader]) is None
    marks = pytest.mark.skipif(missing, reason=f"{PACKAGES[reader]} is not installed")
    return pytest.param(reader, marks=marks)


INSTALLED = [installed(reader) for reader in READERS]


def folder_of(base: Path, kind: str = "mxfp4_quark") -> Path:
    """A prepared folder of two ranks, several shards each."""
    source = tiny.write(base / "source", kind=kind, hidden=256, intermediate=512)
    prepared.prepare(source, base / "out", 2, max_shard_bytes=200_000)
    return base / "out"


def raw(tensor: Any) -> bytes:
    """Return the bytes of a tensor."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def test_every_reader_has_a_package_in_these_tests() -> None:
    assert set(PACKAGES) == set(READERS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", INSTALLED)
def test_a_reader_gives_what_ours_gives(tmp_path: Path, reader: str, kind: str) -> None:
    folder = folder_of(tmp_path, kind)
    ours = load(folder, 1, common=True)
    theirs = load(folder, 1, common=True, reader=reader, check_digests=True)
    assert list(theirs) == list(ours)
    for name, tensor in ours.items():
        found = theirs[name]
        assert (found.dtype, found.shape, vars(found)) == (tensor.dtype, tensor.shape, vars(tensor))
        assert raw(found) == raw(tensor), name


@pytest.mark.parametrize("reader", INSTALLED)
def test_a_flipped_bit_is_found_whatever_reads_it(tmp_path: Path, reader: str) -> None:
    folder = folder_of(tmp_path)
    shard = next(iter(sorted(folder.glob("model-rank-0-part-*"))))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataMismatch, match="digest"):
        load(folder, 0, reader=reader, check_digests=True)


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_package_is_named(
    tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[reader], None)
    with pytest.raises(AiterPrepError, match="is not installed") as caught:
        load(folder_of(tmp_path), 0, reader=reader)
    assert PACKAGES[reader].replace("_", "-") in caught.value.message
    assert "pip install aiter-prep[readers]" in str(caught.value.hint)


def test_an_unknown_reader_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="no reader `mmap`") as caught:
        load(folder_of(tmp_path), 0, reader="mmap")
    assert all(name in str(caught.value.hint) for name in (DIRECT, *READERS))
