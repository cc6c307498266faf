"""The file in which one rank's tensors are handed from the engine to the comparison."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

Bytes = npt.NDArray[np.uint8]

FAILURE = "failure.txt"
"""The file that a folder of dumps holds instead, with the reason, where the engine failed."""

_DATA, _MASK, _FACTS = "data:", "mask:", "dump"


@dataclass(frozen=True)
class TensorFacts:
    """What the engine knows of one tensor besides its bytes.

    Attributes:
        runtime_dtype: torch's name of the dtype, without `torch.`.
        shape: its shape in elements of that dtype.
        stride: its stride at run time; the bytes are stored contiguous.
        is_shuffled: AITER's flag, read from the tensor itself.
        kind: `parameter`, `buffer` or `attribute`.
        masked_bytes: how many bytes are padding that the engine never writes.
    """

    runtime_dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_shuffled: bool
    kind: str
    masked_bytes: int = 0


@dataclass(frozen=True)
class ModuleFacts:
    """What the engine decided for one module of experts."""

    method: str
    backend: str | None
    activation: str | None
    hidden: tuple[int, int]
    intermediate: tuple[int, int]
    local_experts: int
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankDump:
    """Everything that one rank holds of the prepared kind.

    Attributes:
        run: facts of the whole run: engine version, chip, options, environment.
        modules: facts by module path.
        tensors: facts by full tensor name.
        data: the bytes by full tensor name.
        masks: 1 for each byte of uninitialised padding; only tensors that have any.
    """

    run: dict[str, Any]
    modules: dict[str, ModuleFacts]
    tensors: dict[str, TensorFacts]
    data: dict[str, Bytes]
    masks: dict[str, Bytes]


def dump_path(folder: Path, rank: int) -> Path:
    """The file of `rank` in a folder of dumps."""
    return folder / f"rank-{rank}.safetensors"


def write_dump(dump: RankDump, path: Path) -> None:
    """Writes `dump`; `read_dump(path) == dump` afterwards."""
    facts = {
        "run": dump.run,
        "modules": {name: asdict(facts) for name, facts in dump.modules.items()},
        "tensors": {name: asdict(facts) for name, facts in dump.tensors.items()},
    }
    arrays = {_DATA + name: array for name, array in dump.data.items()}
    arrays |= {_MASK + name: array for name, array in dump.masks.items()}
    save_file(arrays, path, metadata={_FACTS: json.dumps(facts, sort_keys=True)})


def _as_tuples(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}


def read_dump(path: Path) -> RankDump:
    """Reads what `write_dump` wrote."""
    with safe_open(path, framework="np") as file:
        facts = json.loads(file.metadata()[_FACTS])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return RankDump(
        run=facts["run"],
        modules={n: ModuleFacts(**_as_tuples(f)) for n, f in facts["modules"].items()},
        tensors={n: TensorFacts(**_as_tuples(f)) for n, f in facts["tensors"].items()},
        data={n.removeprefix(_DATA): a for n, a in arrays.items() if n.startswith(_DATA)},
        masks={n.removeprefix(_MASK): a for n, a in arrays.items() if n.startswith(_MASK)},
    )
