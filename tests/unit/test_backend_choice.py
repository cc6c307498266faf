"""Chooses backends on pretended machines, with pretended packages named `aiter`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from aiter_prep.backends import choices, rocm
from aiter_prep.backends.aiter_package import find_aiter
from aiter_prep.backends.probe import probe_aiter
from aiter_prep.backends.table import BACKENDS, backend_named, choose_backend
from aiter_prep.cli import main
from aiter_prep.errors import AiterPrepError, InvalidUsage, NoRule
from aiter_prep.execution import execute
from prepared import contents, plan_of

# What AITER's functions do, by our own layouts; what AITER leaves uninitialised is noise.
SHUFFLE = """
import torch
from aiter_prep.layouts.table import LAYOUTS

def _by(layout, x):
    return torch.from_numpy(LAYOUTS[layout].apply(x.contiguous().numpy()))

def shuffle_weight(x, layout=(16, 16)):
    assert layout == (16, 16) and x.shape[-1] % 32 == 0
    return _by("tile_16x16", x)

def shuffle_weight_a16w4(src, lanes, gate_up):
    return _by("tile_16x16_interleaved_16" if gate_up else "tile_16x16", src)

def shuffle_scale_a16w4(src, experts_cnt, gate_up):
    x = src.view(experts_cnt, -1, src.shape[-1])
    return _by("e8m0_interleaved_16" if gate_up else "e8m0_unpadded_rows", x).view(src.shape)
"""
NEWER = """
def interleave_gate_up_rows(x):
    half = x.shape[1] // 2
    return torch.stack([x[:, :half], x[:, half:]], 2).flatten(1, 2)

def shuffle_scale_n32k4(src, experts_cnt=None, is_guinterleave=False, gate_up=False):
    name = "e8m0_32x4_interleaved_1" if is_guinterleave and gate_up else "e8m0_32x4"
    return _by(name, src).view(len(src), src.shape[1] // 32, -1)

def shuffle_scale_for_int4(scale):
    experts, groups, rows = scale.shape
    return scale.view(experts, groups // 2, 2, rows).permute(0, 1, 3, 2).contiguous()
"""
FP4_UTILS = """
import torch
from aiter_prep.layouts.table import LAYOUTS

def e8m0_shuffle(x):
    padded = torch.randint(0, 256, (-(-x.shape[0] // 256) * 256, x.shape[1]), dtype=torch.uint8)
    padded[: len(x)] = x
    return torch.from_numpy(LAYOUTS["e8m0"].apply(padded.numpy()))
"""
GOOD = {
    "__init__.py": "",
    "_version.py": "version = '0.1.20'\ncommit_id = 'ge404860'\n",
    "ops/__init__.py": "",
    "ops/shuffle.py": SHUFFLE + NEWER,
    "utility/__init__.py": "",
    "utility/fp4_utils.py": FP4_UTILS,
}
WITHOUT_NEWER = {**GOOD, "ops/shuffle.py": SHUFFLE}
WRONG = {
    **GOOD,
    "ops/shuffle.py": (SHUFFLE + NEWER).replace('_by("tile_16x16", x)', "x.flip(-1).contiguous()"),
}
RAISING = {**GOOD, "utility/fp4_utils.py": "def e8m0_shuffle(x):\n    assert x.ndim == 9, 'no'\n"}
OF_ASYNC_ITERATORS = {"__init__.py": "async def aiter_take(items): ...\n"}
BROKEN = {**GOOD, "ops/__init__.py": "raise RuntimeError('ROCm version file not found')\n"}
BROKEN_INSIDE = {**GOOD, "ops/shuffle.py": "import no_such_compiler\n"}


@pytest.fixture(autouse=True)
def no_aiter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Starts and ends without a package `aiter`, and without a ROCm GPU."""
    monkeypatch.setattr(rocm, "_KFD_NODES", tmp_path / "no nodes")
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)
    forget_aiter()
    yield
    forget_aiter()


def forget_aiter() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installer:
    return Installer(monkeypatch, tmp_path)


class Installer:
    """Puts packages and devices where the product looks for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        self._folder = folder

    def aiter(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self._folder / "site" / "aiter" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text), "utf-8")
        self._monkeypatch.syspath_prepend(str(self._folder / "site"))
        importlib.invalidate_caches()

    def rocm_gpu(self, gfx_version: int = 90500) -> None:
        """Let the driver know a GPU; torch does not see it."""
        nodes = self._folder / "nodes"
        for number, version in enumerate((0, gfx_version)):
            (nodes / str(number)).mkdir(parents=True)
            text = f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n"
            (nodes / str(number) / "properties").write_text(text, "utf-8")
        self._monkeypatch.setattr(rocm, "_KFD_NODES", nodes)

    def torch_with_gpu(self) -> None:
        from fake_gpu import FakeGpu

        gpu = FakeGpu()
        self._monkeypatch.setattr(choices, "import_torch", lambda: gpu)


def refusal(name: str, device: str | None = None) -> AiterPrepError:
    with pytest.raises(AiterPrepError) as caught:
        choose_backend(name, device)
    return caught.value


# --- which one, and why -------------------------------------------------------------------------


def test_without_a_rocm_gpu_auto_takes_cpu_and_says_so() -> None:
    backend, reason = choose_backend()
    assert (backend.name, backend.device) == ("cpu", "cpu")
    assert reason == "this machine has no GPU that the ROCm driver knows"


@pytest.mark.torch
def test_on_a_rocm_host_with_aiter_auto_takes_aiter_and_says_so(install: Installer) -> None:
    install.aiter(GOOD)
    install.rocm_gpu()
    install.torch_with_gpu()
    backend, reason = choose_backend()
    assert (backend.name, backend.device) == ("aiter", "cuda:0")
    assert "gfx950" in reason
    assert "AITER 0.1.20 brings our bytes, fingerprint xxh3-128:" in reason


@pytest.mark.torch
def test_on_a_rocm_host_without_aiter_auto_takes_cpu_and_says_what_is_missing(
    install: Installer,
) -> None:
    install.rocm_gpu(90402)
    install.torch_with_gpu()
    backend, reason = choose_backend()
    assert backend.name == "cpu"
    assert reason == "this machine has gfx942, but AITER is not installed"


@pytest.mark.torch
def test_on_a_rocm_host_whose_torch_sees_no_gpu_auto_takes_cpu(install: Installer) -> None:
    install.aiter(GOOD)
    install.rocm_gpu()
    backend, reason = choose_backend()
    assert backend.name == "cpu"
    assert reason == "this machine has gfx950, but torch sees no GPU"


@pytest.mark.torch
def test_an_aiter_with_other_bytes_is_no_reason_to_do_without_it_quietly(
    install: Installer,
) -> None:
    install.aiter(WRONG)
    install.rocm_gpu()
    install.torch_with_gpu()
    assert "brings other bytes than ours" in refusal("auto").message


@pytest.mark.torch
def test_auto_takes_torch_for_a_gpu_that_was_asked_for(install: Installer) -> None:
    install.torch_with_gpu()
    backend, reason = choose_backend("auto", "cuda:0")
    assert (backend.name, backend.device) == ("torch", "cuda:0")
    assert reason.startswith("device `cuda:0` was asked for")


@pytest.mark.torch
def test_auto_takes_cpu_where_it_was_asked_for(install: Installer) -> None:
    install.aiter(GOOD)
    install.rocm_gpu()
    install.torch_with_gpu()
    assert choose_backend("auto", "cpu")[0].name == "cpu"


def test_cpu_and_auto_without_a_gpu_never_import_torch(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", kind="mxfp4_quark")
    program = f"""
        import sys
        from aiter_prep.execution import execute
        from aiter_prep.plan import make_plan
        from aiter_prep.storage.checkpoint import open_checkpoint
        plan = make_plan(open_checkpoint({str(source)!r}))
        for backend in ("cpu", "auto"):
            execute(plan, {str(tmp_path)!r} + "/" + backend, backend=backend)
        assert "torch" not in sys.modules, "torch was imported"
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- refusals -----------------------------------------------------------------------------------


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(NoRule, match="backend `gpu` is not known") as caught:
        backend_named("gpu")
    assert caught.value.hint == f"known backends: {', '.join(BACKENDS)}"


def test_cpu_runs_on_no_other_device() -> None:
    with pytest.raises(InvalidUsage, match="`cpu` does not run on device `cuda:0`"):
        choose_backend("cpu", "cuda:0")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["torch", "aiter"])
@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x", "", "cuda:1"])
def test_a_device_that_is_not_here_is_refused(install: Installer, name: str, device: str) -> None:
    install.aiter(GOOD)
    if device == "cuda:1":
        install.torch_with_gpu()
    with pytest.raises(InvalidUsage, match=f"device `{device}` is not"):
        choose_backend(name, device)


@pytest.mark.parametrize("name", ["torch", "aiter"])
def test_a_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    fault = refusal(name)
    assert fault.message == "torch is not installed"
    assert "--backend cpu" in fault.hint


@pytest.mark.torch
def test_a_missing_aiter_is_refused_and_the_right_package_is_named() -> None:
    fault = refusal("aiter", "cpu")
    assert fault.message == "AITER is not installed"
    assert "`amd-aiter`" in fault.hint
    assert "asynchronous-iterator library" in fault.hint


@pytest.mark.torch
def test_the_aiter_of_async_iterators_is_told_apart(install: Installer) -> None:
    install.aiter(OF_ASYNC_ITERATORS)
    fault = refusal("aiter", "cpu")
    assert "has no `aiter.ops.shuffle.shuffle_weight`" in fault.message
    assert "`amd-aiter`" in fault.hint


@pytest.mark.torch
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (BROKEN, "RuntimeError: ROCm version file not found"),
        (BROKEN_INSIDE, "ModuleNotFoundError: No module named 'no_such_compiler'"),
    ],
)
def test_an_aiter_that_cannot_be_imported_is_refused_with_the_reason(
    install: Installer, files: dict[str, str], reason: str
) -> None:
    install.aiter(files)
    assert f"cannot be imported: {reason}" in refusal("aiter", "cpu").message


@pytest.mark.torch
def test_an_aiter_without_a_needed_function_is_refused(install: Installer) -> None:
    install.aiter(WITHOUT_NEWER)
    fault = refusal("aiter", "cpu")
    assert "AITER 0.1.20 in " in fault.message
    assert "has no `aiter.ops.shuffle.interleave_gate_up_rows`" in fault.message


@pytest.mark.torch
def test_a_function_that_no_layout_needs_is_not_missed(install: Installer) -> None:
    install.aiter(WITHOUT_NEWER)
    backend, _ = choose_backend("aiter", "cpu", layouts=["tile_16x16", "e8m0", "row_major"])
    assert backend.name == "aiter"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("files", "layout"), [(WRONG, "tile_16x16"), (RAISING, "e8m0")], ids=["bytes", "error"]
)
def test_an_aiter_with_other_bytes_is_refused_with_both_fingerprints(
    install: Installer, files: dict[str, str], layout: str
) -> None:
    install.aiter(files)
    message = refusal("aiter", "cpu").message
    assert f"layout `{layout}`" in message
    fingerprints = {word.strip(",;:") for word in message.split() if word.startswith("xxh3-128:")}
    assert len(fingerprints) >= 2


# --- what it leaves in a folder -----------------------------------------------------------------


@pytest.mark.torch
def test_what_aiter_leaves_uninitialised_is_our_constant_in_the_file(
    install: Installer, tmp_path: Path
) -> None:
    install.aiter(GOOD)
    source = tiny.write(tmp_path / "source", kind="mxfp4_quark", hidden=96, intermediate=96)
    plan = plan_of(source)
    execute(plan, tmp_path / "cpu", backend="cpu")
    wanted = contents(tmp_path / "cpu")
    del wanted["aiter_prep.json"]
    for run in ("one", "another"):
        backend, _ = choose_backend("aiter", "cpu", layouts=["tile_16x16", "e8m0"])
        manifest = execute(plan, tmp_path / run, backend=backend)
        found = contents(tmp_path / run)
        del found["aiter_prep.json"]
        assert found == wanted
        assert manifest.created_by["backend"] == "aiter"
        assert manifest.created_by["aiter_version"] == "0.1.20"
        assert manifest.created_by["aiter_commit"] == "e404860"
        assert manifest.created_by["aiter_fingerprint"].startswith("xxh3-128:")


def test_cpu_leaves_no_version_of_aiter(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    created_by = execute(plan_of(source), tmp_path / "out", backend="cpu").created_by
    assert set(created_by) == {"name", "version", "backend", "device", "aiter_version"}
    assert created_by["aiter_version"] is None


# --- what `env --probe` says --------------------------------------------------------------------


@pytest.mark.torch
def test_the_probe_tells_what_an_older_aiter_has_no_function_for(install: Installer) -> None:
    install.aiter(WITHOUT_NEWER)
    found = probe_aiter()
    assert found.probe.matches
    assert found.missing == (
        "e8m0_32x4",
        "e8m0_32x4_interleaved_1",
        "int4_scale",
        "tile_16x16_interleaved_1",
    )
    said = found.to_json()
    assert said["version"] == "0.1.20"
    assert said["ours"] == said["theirs"]


@pytest.mark.torch
def test_the_probe_tells_which_layout_differs(install: Installer) -> None:
    install.aiter(WRONG)
    found = probe_aiter("cpu")
    assert not found.probe.matches
    assert found.probe.ours != found.probe.theirs
    wrong = [entry.layout for entry in found.probe.layouts if not entry.matches]
    assert wrong == ["tile_16x16", "tile_16x16_interleaved_1"]
    with pytest.raises(AiterPrepError, match=f"{found.probe.theirs}, ours is {found.probe.ours}"):
        found.probe.require()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("version", "commit"),
    [
        ("version = '0.1.7'", None),
        ("version = '0.1.8.dev3+gdeadbee.d20260101'", "deadbee"),
        ("__version__ = version = '1'\n__commit_id__ = commit_id = 'gabcdef1'", "abcdef1"),
        ("", None),
    ],
)
def test_the_commit_is_read_where_builds_write_it(
    install: Installer, version: str, commit: str | None
) -> None:
    install.aiter({**GOOD, "_version.py": version})
    assert find_aiter().commit == commit


@pytest.mark.torch
def test_a_probe_of_an_aiter_without_any_function_of_ours_proves_nothing(
    install: Installer,
) -> None:
    lonely = "def interleave_gate_up_rows(x):\n    return x\n"
    install.aiter({**GOOD, "ops/shuffle.py": lonely, "utility/fp4_utils.py": ""})
    found = probe_aiter()
    assert found.probe.layouts == ()
    assert not found.matches
    with pytest.raises(AiterPrepError, match="no function for any of"):
        found.require()


@pytest.mark.torch
def test_env_probe_prints_the_fingerprint_of_an_aiter_that_brings_our_bytes(
    install: Installer, capsys: pytest.CaptureFixture[str]
) -> None:
    install.aiter(WITHOUT_NEWER)
    assert main(["env", "--probe"]) == 0
    said = capsys.readouterr()
    assert "probe of AITER 0.1.20, commit e404860 on cpu" in said.out
    assert probe_aiter().probe.theirs in said.out
    assert said.out.count("the same bytes") == len(probe_aiter().probe.layouts)
    assert said.out.count("this AITER has no function for it") == 4
    assert main(["env", "--probe", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "aiter-prep/env/1"
    assert document["probe"] == json.loads(json.dumps(probe_aiter().to_json()))
    assert document["probe"]["matches"] is True


@pytest.mark.torch
@pytest.mark.parametrize("files", [WRONG, RAISING])
def test_env_probe_fails_where_aiter_brings_other_bytes(
    install: Installer, capsys: pytest.CaptureFixture[str], files: dict[str, str]
) -> None:
    install.aiter(files)
    assert main(["env", "--probe"]) == 1
    said = capsys.readouterr()
    assert "the same bytes" in said.out
    assert ("other bytes" if files is WRONG else "AssertionError: no") in said.out
    assert "its fingerprint is" in said.err
    assert main(["env", "--probe", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["probe"]["matches"] is False
    assert document["probe"]["theirs"] != document["probe"]["ours"]


@pytest.mark.torch
def test_env_probe_names_the_package_to_install(
    install: Installer, capsys: pytest.CaptureFixture[str]
) -> None:
    for files in ({}, OF_ASYNC_ITERATORS):
        install.aiter(files)
        assert main(["env", "--probe"]) == 1
        assert "`amd-aiter`" in capsys.readouterr().err
        assert main(["env", "--probe", "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert document["schema"] == "aiter-prep/error/1"
        assert "`amd-aiter`" in document["hint"]
        forget_aiter()


def test_env_probe_without_torch_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["env", "--probe"]) == 1
    assert "torch is not installed" in capsys.readouterr().err


def test_a_device_for_env_without_a_probe_is_refused_but_not_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["env", "--device", "cpu"]) == InvalidUsage.exit_code
    monkeypatch.setenv("AITER_PREP_DEVICE", "cpu")
    assert main(["env"]) == 0
