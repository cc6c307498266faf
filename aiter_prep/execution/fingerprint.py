"""What decides the bytes of a result: two runs with the same fingerprint write the same folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep._version import __version__
from aiter_prep.manifest import describe_layout
from aiter_prep.storage import jsontext
from aiter_prep.storage.digest import Digest, digest_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiter_prep.plan.make import Plan
    from aiter_prep.plan.steps import Stack, Step


def fingerprint_of(plan: Plan) -> str:
    """Return a digest of everything that decides the bytes of the result."""
    return digest_of_facts(facts_of_run(plan))


def facts_of_run(plan: Plan) -> dict[str, Any]:
    """Return what a run that is gone on with must have in common with its beginning, by name."""
    headers = [digest_of(shard.layout.header) for shard in plan.shards]
    return {
        **_choices(plan),
        "source": digest_of(jsontext.canonical([_source(plan), _states(plan)])),
        "tensors": digest_of(jsontext.canonical(headers)),
    }


def facts_of(plan: Plan) -> dict[str, Any]:
    """Return what processes that share a conversion must agree on, by name.

    More than the fingerprint: also the program's own text, because two installations may call
    themselves the same version, and what it would do for each tensor.
    """
    checkpoint = plan.checkpoint
    layouts = {stack.layout.name: stack.layout for b in plan.blocks for stack in b.stacks}
    described = {name: describe_layout(layout) for name, layout in layouts.items()}
    # a copy may keep the time of its original, but not the time that the system notes
    changed = [[header.ctime_ns for header in checkpoint.headers], _states(plan)]
    configs = [checkpoint.config, checkpoint.hf_quant_config]
    return {
        **_choices(plan),
        "code": code_digest(),
        "name": [checkpoint.name, checkpoint.revision],
        "source": digest_of(jsontext.canonical([_source(plan), changed])),
        "config": digest_of(jsontext.canonical(configs, allow_nan=True)),
        "layouts": digest_of(jsontext.canonical(described)),
        "tensors": _tensors(plan),
    }


def digest_of_facts(facts: Mapping[str, Any]) -> str:
    """Return a digest of facts."""
    return digest_of(jsontext.canonical(facts))


def _tensors(plan: Plan) -> str:
    """Return a digest of what becomes of every tensor, and where it lies."""
    digest = Digest()
    for shard in plan.shards:
        digest.update(f"{shard.file}\n".encode())
        digest.update(shard.layout.header)
    for block in plan.blocks:
        for stack in block.stacks:
            digest.update(jsontext.canonical(_stack(stack)))
    digest.update(jsontext.canonical([t.name for t in plan.common]))
    digest.update(jsontext.canonical(plan.skipped))
    return digest.text()


def _stack(stack: Stack) -> list[Any]:
    changes = (stack.merge, stack.packing, *(source.conversion for source in stack.sources))
    facts = [
        stack.name,
        [source.pattern for source in (*stack.sources, *stack.scales)],
        [change.name if change else None for change in changes],
        [stack.form.shape, stack.form.fill.hex(), stack.form.among_parts, stack.layout.name],
        [stack.rows, stack.row_bytes, stack.filled_row_bytes, stack.filled_columns],
    ]
    return [*facts, *map(_step, stack.steps)]


def _step(step: Step) -> list[Any]:
    experts, pieces = step.experts, step.pieces
    return [
        [step.rank, experts.start, experts.stop, experts.step, *step.shape],
        [[p.source, *_numbers(p.rows), *_numbers(p.columns), p.to_row] for p in pieces],
    ]


def _numbers(found: range) -> tuple[int, int, int]:
    return found.start, found.stop, found.step


@cache
def code_digest() -> str:
    """Return a digest of the text of every module of this program."""
    root = Path(__file__).parents[1]
    digest = Digest()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.text()


def _choices(plan: Plan) -> dict[str, Any]:
    return {
        "version": __version__,
        "target": plan.target.name,
        "gfx": plan.gfx,
        "ranks": list(plan.ranks),
        "options": dict(plan.options),
        "as_common": list(plan.as_common),
        "fuse_shared_experts": plan.fuse_shared_experts,
        "max_shard_bytes": plan.max_shard_bytes,
        "trust_tensors": plan.trust_tensors,
        "tp": plan.parallel.tp,
        "ep": plan.parallel.ep,
        "placement": plan.parallel.placement,
    }


def _source(plan: Plan) -> list[list[Any]]:
    # with the time of the last change: other weights may have the same header
    return [[h.file, h.file_bytes, h.mtime_ns, h.digest] for h in plan.checkpoint.headers]


def _states(plan: Plan) -> dict[str, str]:
    return plan.checkpoint.remote.states if plan.checkpoint.remote else {}
