"""What every test shares: the checkpoints, the rules for skipping, a neutral environment."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest

from support import FIXTURES, fixture

CONFORMANCE = "AITER_PREP_TEST_CONFORMANCE_ENV"
"""Names the folder that `scripts/conformance-env` made: the engines' own code."""

# Asked for by `scripts/test --torch`: then a missing torch is a failure, not a reason to skip.
TORCH_IS_PROMISED = os.environ.get("AITER_PREP_TEST_TORCH") == "1"

hypothesis.settings.register_profile("everywhere", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("everywhere"), derandomize=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "everywhere")


def pytest_configure() -> None:
    """Frees this process and its children from what the user's shell says."""
    for name in list(os.environ):
        ours = name.startswith("AITER_PREP_") and not name.startswith("AITER_PREP_TEST_")
        if ours or name in {"COLUMNS", "FORCE_COLOR", "NO_COLOR"}:
            del os.environ[name]
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads anything


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fails where pytest-xdist has not noted the groups: each worker would start every engine."""
    if not getattr(config.option, "loadgroup", False):  # set in workers alone
        return
    for item in items:
        if item.get_closest_marker("xdist_group") is not None and "@" not in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} has lost its group: see pytest in pyproject")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what this machine cannot run, and says why."""
    for name in ("torch", "vllm", "ray", "gpu"):
        if item.get_closest_marker(name) is not None and (reason := _missing(name)):
            pytest.skip(reason)


@functools.cache
def _missing(name: str) -> str:
    """Why a test with the marker `name` cannot run here, or an empty text."""
    if name == "gpu":
        return "" if _has_gpu() else "no GPU that torch can use"
    if name == "vllm":
        why = (
            f"NOT COMPARED WITH THE ENGINES: {CONFORMANCE} is not set; see scripts/conformance-env"
        )
        return "" if os.environ.get(CONFORMANCE) else why
    if name == "torch" and TORCH_IS_PROMISED:
        return ""
    return "" if importlib.util.find_spec(name) else f"{name} is not installed"


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture(params=FIXTURES)
def checkpoint_folder(request: pytest.FixtureRequest) -> Path:
    """Each of the small checkpoints in turn."""
    return fixture(request.param)
