"""Prepared folders of every released format version verify, load and come back for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import tiny
from aiter_prep.errors import NoRule
from aiter_prep.manifest import read_manifest
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.verification import verify

HOME = Path(__file__).resolve().parents[1] / "released"
FOLDERS = sorted(HOME.glob("*/*/prepared"))


@pytest.mark.parametrize("folder", FOLDERS, ids=[str(f.parent.relative_to(HOME)) for f in FOLDERS])
def test_a_released_folder_verifies_and_its_source_comes_back(folder: Path, tmp_path: Path) -> None:
    source = folder.parent / "source"
    assert verify(folder).is_clean
    assert verify(folder, source=open_checkpoint(source)).is_clean
    try:
        restore(folder, tmp_path / "back")
    except NoRule:
        assert read_manifest(folder).lossy
    else:
        assert tiny.read_folder(tmp_path / "back") == tiny.read_folder(source)


@pytest.mark.parametrize("folder", FOLDERS, ids=[str(f.parent.relative_to(HOME)) for f in FOLDERS])
def test_a_released_folder_opens_with_any_reader(folder: Path) -> None:
    for record in read_manifest(folder).tensors:
        if record.dtype in ("U8", "F32", "F16"):
            array = load_file(folder / record.file)[record.name]
            assert array.shape == record.shape
            assert np.asarray(array).nbytes == array.nbytes
