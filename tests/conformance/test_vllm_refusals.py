"""vLLM refuses prepared folders that do not fit what runs, and says what to do instead."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from conformance.engine_run import ENGINES, Environment
from conformance.loader_site import product_site, run_engine

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm refusals")]


@dataclasses.dataclass(frozen=True)
class Expected:
    """One case, and what the engine must say.

    Attributes:
        folder: which folder is loaded: the name of a fixture's entry.
        said: parts of the message.
        facts: what else there is to the case; see `conformance.loader_refusals.Case`.
        load_format: the load format.
    """

    folder: str
    said: tuple[str, ...]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    load_format: str = "aiter_prep"

    def case(self, model: Path, out: Path) -> dict[str, Any]:
        """The case as the engine's process reads it."""
        arguments = {"load_format": self.load_format, **self.facts.get("engine_args", {})}
        return {**self.facts, "model": str(model), "out": str(out), "engine_args": arguments}


MISMATCH = "EngineMismatch: "
_TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0}}
EXPECTED = {
    "what fits is loaded": Expected("prepared", ("loaded",)),
    "the engine's own load format": Expected(
        "prepared", (MISMATCH, "a second time", "--load-format aiter_prep"), load_format="auto"
    ),
    "another load format of the engine": Expected(
        "prepared", (MISMATCH, "`--load-format aiter_prep`"), load_format="safetensors"
    ),
    "another tensor-parallel size": Expected(
        "prepared", (MISMATCH, "shared by tp 4 and ep 1", "--tp 4"), {"tp": 4}
    ),
    "expert parallelism": Expected(
        "prepared", (MISMATCH, "shared by tp 1 and ep 2", "--ep 2"), {"expert_parallel": True}
    ),
    "a rank that was not prepared": Expected(
        "rank 1", (MISMATCH, "rank 0, the folder holds 1", "aiter-prep convert")
    ),
    "another backend": Expected(
        "prepared",
        (MISMATCH, "backend `TRITON`", "VLLM_ROCM_USE_AITER=1"),
        {"engine_args": {"moe_backend": "triton"}},
    ),
    "another dtype": Expected(
        "prepared",
        (MISMATCH, "made room for torch.float16", "--dtype bfloat16"),
        {"engine_args": {"dtype": "float16"}},
    ),
    "another target": Expected("aiter", (MISMATCH, "prepared for `aiter`", "--target vllm@0.33")),
    "another chip": Expected(
        "gfx942", (MISMATCH, "prepared for gfx942, this process runs on gfx950", "--gfx gfx950")
    ),
    "no AITER": Expected(
        "prepared", (MISMATCH, "AITER is not installed", "amd-aiter"), {"without_aiter": True}
    ),
    "an unknown version": Expected(
        "prepared", (MISMATCH, "vLLM 0.34.0 is not known", "0.32, 0.33"), {"version": "0.34.0"}
    ),
    "AITER switched off": Expected(
        "prepared",
        (MISMATCH, "backend `TRITON`", "VLLM_ROCM_USE_AITER=1"),
        {"variables": {"VLLM_ROCM_USE_AITER": "0"}},
    ),
    "another AITER": Expected(
        "prepared",
        (MISMATCH, "the installed AITER lays out `tile_16x16` in another way", "install the AITER"),
        {"other_aiter": True},
    ),
    "another order of rows": Expected(
        "deepseek_v41",
        (
            MISMATCH,
            "rows of gate and up",
            "wants them separated",
            "VLLM_ROCM_USE_AITER_*",
            "--activation-dtype fp4",
        ),
        {"variables": {"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "1"}, "engine_args": _TEXT_ONLY},
    ),
    "other sizes": Expected(
        "other sizes",
        (MISMATCH, "padded intermediate size per rank", "is 256 in the folder, the engine wants"),
    ),
    "a damaged tensor": Expected(
        "damaged",
        ("DataMismatch: ", "has the digest", "the manifest says"),
        {"engine_args": {"model_loader_extra_config": {"check_digests": True}}},
    ),
    "a file cut short": Expected("cut", ("DataMismatch: ", "model-rank-0-part-0.safetensors")),
    "a reader that is not installed": Expected(
        "prepared",
        ("AiterPrepError: ", "the package `fastsafetensors` is not installed"),
        {"engine_args": {"model_loader_extra_config": {"reader": "fastsafetensors"}}},
    ),
    "a second load into a running engine": Expected(
        "prepared", (MISMATCH, "cannot be loaded again", "start the engine again"), {"again": True}
    ),
    "a folder without its manifest": Expected(
        "no manifest", (MISMATCH, "no local folder with `aiter_prep.json`")
    ),
    "a source": Expected("source", (MISMATCH, "is not a prepared folder", "aiter-prep convert")),
    "no plugin": Expected(
        "prepared",
        ("Unknown quantization method: aiter_prep",),
        {"variables": {"VLLM_PLUGINS": ""}},
        load_format="auto",
    ),
}


def with_other_sizes(folder: Path) -> None:
    """Makes the config say another size than the tensors have."""
    config = json.loads((folder / "config.json").read_text())
    config["moe_intermediate_size"] //= 2
    (folder / "config.json").write_text(json.dumps(config))


def with_a_flipped_bit(folder: Path) -> None:
    """Changes the last byte of the first rank's experts."""
    shard = folder / "model-rank-0-part-0.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut_short(folder: Path) -> None:
    """Takes the last byte off the first rank's experts."""
    shard = folder / "model-rank-0-part-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


CHANGES = {"other sizes": with_other_sizes, "damaged": with_a_flipped_bit, "cut": cut_short}
"""Copies of the folder that was prepared well, and what was done to them."""

Said = Callable[[str, str], str]


@pytest.fixture(scope="module")
def folders(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The folders of the cases."""
    base = tmp_path_factory.mktemp("refused")
    source = checkpoint("bf16")
    made: dict[str, dict[str, Any]] = {
        "prepared": {},
        "no manifest": {},
        "rank 1": {"ranks": [1]},
        "aiter": {"target": "aiter"},
        "gfx942": {"gfx": "gfx942"},
    }
    for name, options in made.items():
        arguments = {"target": "vllm", "tp": 2, **options}
        execute(make_plan(open_checkpoint(source), **arguments), base / name)
    (base / "no manifest" / "aiter_prep.json").unlink()
    for name, change in CHANGES.items():
        shutil.copytree(base / "prepared", base / name)
        change(base / name)
    arguments = {"target": "vllm", "tp": 2}
    execute(
        make_plan(open_checkpoint(checkpoint("deepseek_v41")), **arguments), base / "deepseek_v41"
    )
    return {"source": source, **{path.name: path for path in base.iterdir()}}


@pytest.fixture(scope="module")
def said(
    environment: Environment,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Said:
    """What a version of the engine said to a case; all cases are tried at once."""
    base = tmp_path_factory.mktemp("said")
    site = product_site(base / "site")
    numbers = {name: number for number, name in enumerate(EXPECTED)}

    def text(version: str, name: str) -> str:
        folder = base / version
        printed = ""
        if not folder.exists():
            folder.mkdir()
            cases = [
                expected.case(folders[expected.folder], folder / str(numbers[other]))
                for other, expected in EXPECTED.items()
            ]
            (folder / "cases.json").write_text(json.dumps(cases))
            where = Environment(environment.folder, version)
            words = ["conformance.loader_refusals", folder / "cases.json"]
            printed = run_engine(where, [site], [*words, "--aiter", where.aiter, "--gfx", "gfx950"])
        file = folder / str(numbers[name])
        assert file.exists(), printed[-6000:]
        return file.read_text()

    return text


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("version", sorted(ENGINES))
def test_the_engine_says_what_differs_and_what_to_do(version: str, name: str, said: Said) -> None:
    text = said(version, name)
    for part in EXPECTED[name].said:
        assert part in text, text
