"""The versions for a bug report come from any machine, however broken its packages are."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiter_prep import environment
from aiter_prep._version import __version__
from aiter_prep.backends import rocm
from aiter_prep.cli.env import _rows
from aiter_prep.environment import look_around

TORCH = """
__version__ = "2.8.0+rocm6.4"

class version:
    hip = "6.4.43482"
    cuda = None

class _Properties:
    name = "AMD Instinct MI355X"
    gcnArchName = "gfx950:sramecc+:xnack-"
    total_memory = 309220868096

class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_properties = staticmethod(lambda number: _Properties)
"""


HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose packages hide those of this machine."""
    if HAS_TORCH:
        pytest.skip("torch is installed, and a process that loads it twice breaks")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in [m for m in sys.modules if m.partition(".")[0] in {"torch", "aiter"}]:
        del sys.modules[module]  # or the next test would find it


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package is installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("importlib.metadata.version", _raise)
    monkeypatch.setattr(environment, "_is_there", lambda _: False)


def _raise(name: str) -> str:
    raise ModuleNotFoundError(name)


def words() -> dict[str, str]:
    """What `aiter-prep env` says, by its first column."""
    return dict(_rows(look_around()))


def test_our_own_version_and_pythons_are_always_there() -> None:
    found = look_around()
    assert found.aiter_prep == __version__
    assert found.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert found.packages["numpy"]


@pytest.mark.usefixtures("nothing")
def test_nothing_needs_to_be_installed() -> None:
    found = look_around()
    assert set(found.packages.values()) == {None}
    assert found.torch == {"version": None}
    assert found.aiter == {"kind": "missing"}
    assert words()["torch"] == words()["AITER"] == "not installed"


def test_the_document_is_json() -> None:
    assert json.loads(json.dumps(look_around().to_json()))["aiter_prep"] == __version__


def test_torch_tells_its_backend_and_its_chips(packages: Path) -> None:
    (packages / "torch.py").write_text(TORCH)
    found = look_around().torch
    assert found["hip"] == "6.4.43482"
    assert [device["gfx"] for device in found["devices"]] == ["gfx950", "gfx950"]
    assert words()["torch"] == "2.8.0+rocm6.4 (HIP 6.4.43482)"
    assert words()["device 1"] == "AMD Instinct MI355X, gfx950, 309.2 GB"


@pytest.mark.parametrize(
    "text", ["import no_such_module_at_all", "raise SystemExit(3)", "x = 1", "def broken(:"]
)
def test_a_broken_torch_is_reported(packages: Path, text: str) -> None:
    (packages / "torch.py").write_text(text)
    assert look_around().torch["fault"]
    assert "does not work" in words()["torch"]


def test_what_torch_prints_stays_out_of_the_result(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (packages / "torch.py").write_text(f"print('noise')\n{TORCH}")
    look_around()
    assert capsys.readouterr().out == ""


def test_aiter_is_known_by_its_function(packages: Path) -> None:
    ops = packages / "aiter" / "ops"
    ops.mkdir(parents=True)
    (packages / "aiter" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (ops / "shuffle.py").write_text("import torch\n\ndef shuffle_weight(x, layout=(16, 16)):\n")
    found = look_around().aiter
    assert (found["kind"], found["folder"]) == ("aiter", str(packages / "aiter"))
    assert str(packages / "aiter") in words()["AITER"]


def test_the_aiter_of_pypi_is_called_another_package(packages: Path) -> None:
    (packages / "aiter").mkdir()
    (packages / "aiter" / "__init__.py").write_text("def anext(): ...")
    assert look_around().aiter["kind"] == "another package"
    assert "asynchronous-iterator library" in words()["AITER"]
    assert "shuffle_weight" in words()["AITER"]


def test_an_aiter_that_cannot_be_looked_at_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", _raise)
    assert look_around().aiter == {"kind": "broken", "fault": "ModuleNotFoundError: aiter"}
    assert "cannot be looked at" in words()["AITER"]


@pytest.mark.parametrize(
    ("version", "chip"),
    [("90402", "gfx942"), ("90500", "gfx950"), ("90010", "gfx90a"), ("120500", "gfx1250")],
)
def test_chips_are_read_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, chip: str
) -> None:
    for number, text in enumerate(("0", version)):  # the first node is a CPU
        node = tmp_path / str(number)
        node.mkdir()
        (node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {text}\n")
    monkeypatch.setattr(rocm, "_KFD_NODES", tmp_path)
    assert look_around().chips == (chip,)


def test_the_version_of_rocm_is_the_first_line_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text("6.4.1-83\n")
    monkeypatch.setattr(environment, "_ROCM_VERSION", tmp_path / "version")
    assert look_around().rocm == "6.4.1-83"
    monkeypatch.setattr(environment, "_ROCM_VERSION", tmp_path / "nowhere")
    assert look_around().rocm is None
