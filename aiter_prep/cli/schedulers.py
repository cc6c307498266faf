"""Which part of a conversion this process is to write: by flag, or by what a scheduler says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiter_prep.execution.bundles import Part

AUTO = "auto"
SLURM_ID = "SLURM_ARRAY_TASK_ID"
SLURM = (SLURM_ID, "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT")
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"


def part_of(text: str, environment: Mapping[str, str] = os.environ) -> tuple[Part, str]:
    """Return a part, and where it was taken from.

    Args:
        text: `3/8`; `auto`, or `auto/8` where the scheduler does not say how many there are.
        environment: What the scheduler says.

    Raises:
        InvalidUsage: It is no part, or the scheduler does not say which.
    """
    from aiter_prep.execution.bundles import parse_part

    how, _, count = text.partition("/")
    if how != AUTO:
        return parse_part(text), "--part"
    if SLURM_ID in environment:
        part = _slurm(environment)
        if count and parse_part(f"1/{count}").count != part.count:
            raise InvalidUsage(
                f"--part {printable(text)}, but the array of Slurm has {part.count} tasks",
                "give the number of the part itself, such as --part 3/8",
            )
        return part, ", ".join(f"{name}={environment[name]}" for name in SLURM)
    if KUBERNETES_INDEX in environment:
        if not count:
            raise InvalidUsage(
                f"--part auto: {KUBERNETES_INDEX} says which part this is, but nothing says how "
                "many there are",
                "give the `completions` of the Job: --part auto/8",
            )
        index = _number(environment, KUBERNETES_INDEX)
        return parse_part(f"{index + 1}/{count}"), f"{KUBERNETES_INDEX}={index}"
    raise InvalidUsage(
        f"--part {printable(text)}: neither {SLURM_ID} nor {KUBERNETES_INDEX} is set",
        "run it in a Slurm array or a Kubernetes Indexed Job, or give the part, such as --part 3/8",
    )


def _slurm(environment: Mapping[str, str]) -> Part:
    """Return the part that a task of a Slurm array stands for.

    Its numbers may begin anywhere, and be a step apart; an array such as `1,5-7` has no order that
    its tasks could tell.
    """
    from aiter_prep.execution.bundles import parse_part

    task, first, last, count = (_number(environment, name) for name in SLURM)
    step, rest = divmod(last - first, count - 1) if count > 1 else (1, 0)
    place, off = divmod(task - first, max(1, step))
    if rest or off or not 0 <= place < count:
        raise InvalidUsage(
            f"--part auto: task {task} of {count} tasks from {first} to {last} cannot be told to "
            "be a part of theirs",
            "use an array such as 1-8, or give the part, such as --part 3/8",
        )
    return parse_part(f"{place + 1}/{count}")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise InvalidUsage(
            f"--part auto: {name} is {printable(text) or 'not set'}, no number",
            "give the part, such as --part 3/8",
        )
    return int(text)
