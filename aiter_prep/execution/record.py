"""Writes down what was done: from a plan and digests to a manifest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aiter_prep import _version
from aiter_prep.manifest import (
    FileRecord,
    Lost,
    Manifest,
    Pad,
    ShardRecord,
    SourceSlice,
    TensorRecord,
    describe_layout,
)
from aiter_prep.storage.checkpoint import METHOD
from aiter_prep.storage.digest import digest_of, tree_digest
from aiter_prep.storage.output import Written

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aiter_prep.backends.table import Backend
    from aiter_prep.plan.make import BlockPlan, Plan
    from aiter_prep.plan.shards import Shard
    from aiter_prep.plan.steps import Piece, Stack, Step
    from aiter_prep.storage.header import TensorInfo

FORMAT_VERSION = 1


def created_by(backend: Backend) -> dict[str, Any]:
    """Return what a manifest says of this program and the backend that did the work."""
    return {
        "name": "aiter-prep",
        "version": _version.__version__,
        "backend": backend.name,
        "device": backend.device,
        **backend.provenance,
    }


def manifest_of(
    plan: Plan,
    maker: Mapping[str, Any],
    done: Mapping[str, Mapping[str, Written]],
    files: Sequence[tuple[str, int, str]],
) -> Manifest:
    """Return the manifest of a finished run.

    Args:
        plan: What was to be done.
        maker: What did it, from `created_by`.
        done: Shard to tensor to what was noted of it.
        files: Name, size and digest of every file beside the shards.
    """
    stacks = [stack for block in plan.blocks for stack in block.stacks]
    layouts = {stack.layout.name: describe_layout(stack.layout) for stack in stacks}
    changes = [c for s in stacks for c in (s.merge, s.packing, *(x.conversion for x in s.sources))]
    conversions = {change.name: change.meaning for change in changes if change is not None}
    return Manifest(
        created_by=maker,
        source=source_of(plan),
        target=target_of(plan),
        model=_model(plan),
        options=options_of(plan),
        layouts=layouts,
        conversions=conversions,
        shards=tuple(_shard(shard, done[shard.file]) for shard in plan.shards),
        files=tuple(FileRecord(*item) for item in files),
        tensors=tuple(_tensors(plan, done)),
        skipped=tuple({"name": name, "reason": reason} for name, reason in plan.skipped),
    )


def differing_fields(plan: Plan, manifest: Manifest) -> list[str]:
    """Return the fields of a manifest that are not what a plan leads to, digests apart.

    Who made the folder, and where its source lay, follow from no plan.
    """
    done: dict[str, dict[str, Written]] = {shard.file: {} for shard in plan.shards}
    for record in manifest.tensors:
        lost = () if record.lost is None else (record.lost.count, record.lost.positions)
        done.setdefault(record.file, {})[record.name] = Written(record.digest, *lost)
    if {s.file: set(s.layout.slots) for s in plan.shards} != {f: set(n) for f, n in done.items()}:
        return ["shards"]
    files = [(file.name, file.size, file.digest) for file in manifest.files]
    wanted = manifest_of(plan, manifest.created_by, done, files)
    fields = ("target", "model", "options", "layouts", "conversions", "shards", "tensors")
    return [f for f in (*fields, "skipped") if getattr(wanted, f) != getattr(manifest, f)]


def plan_arguments(manifest: Manifest) -> dict[str, Any]:
    """Return the arguments of `make_plan` that a manifest was planned with."""
    return _arguments(manifest.target, manifest.options)


def arguments_of(plan: Plan) -> dict[str, Any]:
    """Return the arguments of `make_plan` that lead to a plan, as JSON would bring them back."""
    return _arguments(target_of(plan), options_of(plan))


def _arguments(target: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tp": target["tp"],
        "ep": target["ep"],
        "placement": target["placement"],
        "target": target["name"],
        "gfx": target["gfx"],
        "ranks": target["ranks"],
        "options": options["engine"],
        "max_shard_bytes": options["max_shard_bytes"],
        "as_common": options["as_common"],
        "trust_tensors": options["trust_tensors"],
        "fuse_shared_experts": options["fuse_shared_experts"],
    }


def wrapped_config(config: Mapping[str, Any]) -> bytes:
    """Return `config.json` for a prepared folder: its quantisation wrapped.

    An engine that does not know the method `aiter_prep` refuses it by name instead of shuffling
    shuffled weights again.
    """
    wrapped = dict(config)
    wrapped["quantization_config"] = _wrap(config.get("quantization_config"))
    text = config.get("text_config")
    if isinstance(text, dict) and "quantization_config" in text:
        wrapped["text_config"] = {**text, "quantization_config": _wrap(text["quantization_config"])}
    # NaN and infinity as Python writes and reads them, and so transformers
    return (json.dumps(wrapped, indent=2) + "\n").encode()


def _wrap(original: Any) -> dict[str, Any]:
    return {"quant_method": METHOD, "format_version": FORMAT_VERSION, "source": original}


def source_of(plan: Plan) -> dict[str, Any]:
    """Return what a manifest says of the source of a plan."""
    remote = plan.checkpoint.remote
    sha256 = remote.sha256 if remote else {}
    return {
        "name": plan.checkpoint.name,
        "revision": plan.checkpoint.revision,
        "files": [
            {
                "name": header.file,
                "size": header.file_bytes,
                "header_digest": header.digest,
                **({"sha256": sha256[header.file]} if header.file in sha256 else {}),
            }
            for header in plan.checkpoint.headers
        ],
    }


def target_of(plan: Plan) -> dict[str, Any]:
    """Return what a manifest says of the target of a plan."""
    return {
        "name": plan.target.name,
        "engine": plan.target.engine,
        "engine_version": plan.target.engine_version,
        "gfx": plan.gfx,
        "tp": plan.parallel.tp,
        "ep": plan.parallel.ep,
        "placement": plan.parallel.placement,
        "ranks": list(plan.ranks),
    }


def options_of(plan: Plan) -> dict[str, Any]:
    """Return what a manifest says of the options of a plan."""
    return {
        "fuse_shared_experts": plan.fuse_shared_experts,
        "as_common": list(plan.as_common),
        "engine": dict(plan.options),
        "max_shard_bytes": plan.max_shard_bytes,
        "trust_tensors": plan.trust_tensors,
    }


def _model(plan: Plan) -> dict[str, Any]:
    return {
        "architecture": plan.checkpoint.architecture,
        "model_type": plan.checkpoint.model_type,
        "blocks": [_block(block) for block in plan.blocks],
    }


def _block(plan: BlockPlan) -> dict[str, Any]:
    return {
        "experts": plan.block.experts,
        "family": plan.block.family.name,
        "scheme": plan.block.scheme.name,
        "row_order": plan.path.row_order,
        "num_experts": plan.block.num_experts,
        "hidden": plan.block.hidden,
        "padded_hidden": plan.cut.hidden,
        "intermediate": plan.block.intermediate,
        "padded_intermediate_per_rank": plan.cut.intermediate,
    }


def shard_digest(shard: Shard, done: Mapping[str, Written]) -> str:
    """Return the digest of a shard, from those of its tensors."""
    in_order = (done[name].digest for name in shard.layout.slots)
    return tree_digest(digest_of(shard.layout.header), in_order)


def _shard(shard: Shard, done: Mapping[str, Written]) -> ShardRecord:
    return ShardRecord(
        file=shard.file,
        rank=shard.rank,
        part=shard.part,
        size=shard.layout.total_bytes,
        header_digest=digest_of(shard.layout.header),
        digest=shard_digest(shard, done),
    )


def _tensors(plan: Plan, done: Mapping[str, Mapping[str, Written]]) -> Iterator[TensorRecord]:
    prepared = {
        (step.rank, stack.name): (stack, step)
        for block in plan.blocks
        for stack in block.stacks
        for step in stack.steps
    }
    common = {tensor.name: tensor for tensor in plan.common}
    for shard in plan.shards:
        for name in sorted(shard.layout.slots):
            written = done[shard.file][name]
            if shard.rank is None:
                yield _common(common[name], shard.file, written.digest)
            else:
                yield _prepared(*prepared[shard.rank, name], shard.file, written)


def _common(tensor: TensorInfo, file: str, digest: str) -> TensorRecord:
    return TensorRecord(
        name=tensor.name,
        rank=None,
        file=file,
        dtype=tensor.dtype,
        runtime_dtype=None,
        shape=tensor.shape,
        logical_shape=tensor.shape,
        layout=None,
        is_shuffled=False,
        merge=None,
        packing=None,
        experts=None,
        matrix=None,
        form=None,
        pads=(),
        fill="",
        lost=None,
        source=(),
        digest=digest,
    )


def _prepared(stack: Stack, step: Step, file: str, written: Written) -> TensorRecord:
    return TensorRecord(
        name=stack.name,
        rank=step.rank,
        file=file,
        dtype=stack.dtype,
        runtime_dtype=stack.runtime_dtype,
        shape=step.shape,
        logical_shape=step.logical_shape,
        layout=stack.layout.name,
        is_shuffled=stack.layout.is_shuffled,
        merge=stack.merge.name if stack.merge else None,
        packing=stack.packing.name if stack.packing else None,
        experts=(step.experts.start, step.experts.stop, step.experts.step),
        matrix=(stack.rows, stack.row_bytes, stack.filled_row_bytes),
        form=stack.form.shape,
        pads=tuple(_pads(stack, step)),
        fill=stack.form.fill.hex(),
        lost=_lost(stack, written),
        source=tuple(_slice(stack, piece) for piece in step.pieces),
        digest=written.digest,
    )


def _lost(stack: Stack, written: Written) -> Lost | None:
    conversion = stack.sources[0].conversion
    lost = conversion.lost if conversion else None
    if lost is None or not written.lost_count:
        return None
    return Lost(*lost, written.lost_count, written.lost_positions)


def _pads(stack: Stack, step: Step) -> Iterator[Pad]:
    experts, rows, *columns = step.logical_shape
    fill, layout_fill = stack.form.fill.hex(), f"{stack.layout.pad_byte:02x}"
    if rows != stack.rows:
        yield Pad("rows", rows, stack.rows, fill)
    # in units of the matrix before it is packed, so that both sizes are of one kind
    width = stack.filled_row_bytes // max(1, stack.filled_columns)
    filled, stored = stack.filled_columns, stack.row_bytes // width
    if columns and columns[0] != filled:
        yield Pad("columns", columns[0], filled, fill)
    if stored != filled:
        yield Pad("layout_columns", filled, stored, layout_fill)
    if stack.form.shape == "folded" and step.shape[0] != experts * stack.rows:
        yield Pad("stored_rows", experts * stack.rows, step.shape[0], layout_fill)


def _slice(stack: Stack, piece: Piece) -> SourceSlice:
    source = stack.sources[piece.source]
    return SourceSlice(
        pattern=source.pattern,
        dtype=source.dtype,
        shape=source.tensors[0].shape,
        fused=source.fused,
        shared=source.shared,
        rows=(piece.rows.start, piece.rows.stop, piece.rows.step),
        columns=(piece.columns.start, piece.columns.stop),
        row_bytes=source.row_bytes,
        transposed=source.transposed,
        conversion=source.conversion.name if source.conversion else None,
        to_row=piece.to_row,
    )
