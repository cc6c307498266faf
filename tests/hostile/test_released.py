"""Prepared folders of every released format version verify, load and come back for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import aiter_prep
import tiny
from aiter_prep.errors import NoRule
from aiter_prep.layouts.table import LAYOUTS
from aiter_prep.manifest import FORMAT_VERSION, read_manifest
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.storage.digest import digest_of
from aiter_prep.verification import verify
from prepared import contents

HOME = Path(__file__).resolve().parents[1] / "released"
FOLDERS = sorted(HOME.glob("*/*/prepared"))


def test_every_format_version_has_its_folders_and_nobody_has_changed_them() -> None:
    assert {folder.name for folder in HOME.iterdir()} == set(map(str, range(1, FORMAT_VERSION + 1)))
    for home in HOME.iterdir():
        found = contents(home)
        del found["SHA256SUMS"]
        lines = (home / "SHA256SUMS").read_text("utf-8").splitlines()
        assert dict(line.split("  ", 1)[::-1] for line in lines) == found


def test_the_folders_hold_every_form_and_every_layout() -> None:
    manifests = [read_manifest(folder) for folder in FOLDERS]
    records = [record for manifest in manifests for record in manifest.tensors]
    forms = {record.form for record in records}
    assert forms == {None, "matrices", "folded", "flat", "row_blocks", "rows", "values", "scalar"}
    assert {record.layout for record in records} >= LAYOUTS.keys()


@pytest.mark.parametrize("folder", FOLDERS, ids=[str(f.parent.relative_to(HOME)) for f in FOLDERS])
def test_a_released_folder_verifies_and_its_source_comes_back(folder: Path, tmp_path: Path) -> None:
    source = folder.parent / "source"
    assert verify(folder).is_clean
    assert verify(folder, source=open_checkpoint(source)).is_clean
    if read_manifest(folder).lossy:
        with pytest.raises(NoRule, match="cannot be undone"):
            restore(folder, tmp_path / "back")
    else:
        restore(folder, tmp_path / "back")
        assert tiny.read_folder(tmp_path / "back") == tiny.read_folder(source)


@pytest.mark.parametrize("folder", FOLDERS, ids=[str(f.parent.relative_to(HOME)) for f in FOLDERS])
def test_a_released_folder_opens_with_any_reader(folder: Path) -> None:
    for record in read_manifest(folder).tensors:
        if record.dtype in ("U8", "F32", "F16"):
            with safe_open(folder / record.file, "numpy") as shard:
                array = shard.get_tensor(record.name)
            assert array.shape == record.shape
            assert digest_of(np.ascontiguousarray(array).reshape(-1)) == record.digest


@pytest.mark.torch
@pytest.mark.parametrize("folder", FOLDERS, ids=[str(f.parent.relative_to(HOME)) for f in FOLDERS])
def test_a_released_folder_loads_with_the_flag_of_aiter(folder: Path) -> None:
    manifest = read_manifest(folder)
    for rank in manifest.target["ranks"]:
        tensors = aiter_prep.load(folder, rank, common=True, check_digests=True)
        records = [r for r in manifest.tensors if r.rank in {None, rank}]
        assert tensors.keys() == {record.name for record in records}
        for record in records:
            tensor = tensors[record.name]
            is_weight = "scale" not in record.name.rpartition(".")[2]
            flag = getattr(tensor, "is_shuffled", False)
            assert flag == (record.is_shuffled and is_weight), record.name
            assert getattr(tensor, "aiter_prep_layout", None) == record.layout
