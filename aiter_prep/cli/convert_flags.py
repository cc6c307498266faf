"""The flags of `aiter-prep convert`, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from aiter_prep.cli.flags import PUSH, local, named
from aiter_prep.cli.values import Sharing

Source: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        parser=named("SOURCE"),
        help="A folder with config.json and safetensors, a Hub id, org/name, or s3://BUCKET/FOLDER.",
    ),
]
Out: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="OUT",
        parser=local("OUT", PUSH),
        help="The folder to write; ./NAME-aiter-tpN-GFX by default.",
    ),
]
Tp: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        "--tp",
        "--tensor-parallel-size",
        "-tp",
        metavar="N",
        envvar="AITER_PREP_TP",
        help="Tensor-parallel ranks; required, unless --ep is given. "
        "`aiter-prep inspect SOURCE` shows which numbers work. Several "
        "times: a folder for each, OUT/tp4 and so on, of one reading of the source.",
    ),
]
Ep: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--ep",
        metavar="N",
        envvar="AITER_PREP_EP",
        help="Expert-parallel ranks, instead of --tp: each holds whole experts.",
    ),
]
Placement: TypeAlias = Annotated[
    str,
    typer.Option(
        "--placement",
        metavar="NAME",
        envvar="AITER_PREP_PLACEMENT",
        help="Which experts an --ep rank holds: linear or round_robin.",
    ),
]
GateUp: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--gate-up",
        metavar="ORDER",
        envvar="AITER_PREP_GATE_UP",
        help="Order of gate and up rows, where the target leaves a choice.",
    ),
]
ActivationDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--activation-dtype",
        metavar="DTYPE",
        envvar="AITER_PREP_ACTIVATION_DTYPE",
        help="Dtype of the experts' inputs, where the target leaves a choice.",
    ),
]
MoeBackend: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--moe-backend",
        metavar="NAME",
        envvar="AITER_PREP_MOE_BACKEND",
        help="The engine's flag of that name, where the target leaves a choice.",
    ),
]
FuseSharedExperts: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--fuse-shared-experts",
        envvar="AITER_PREP_FUSE_SHARED_EXPERTS",
        help="Append shared experts to the routed ones, for an engine that fuses them.",
    ),
]
Gfx: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="AITER_PREP_GFX",
        metavar="NAME",
        help="The chip, such as gfx942; by default this machine's, or gfx950 without one.",
    ),
]
Target: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="AITER_PREP_TARGET",
        metavar="NAME",
        help="What the result is for; `aiter-prep layouts` lists the targets.",
    ),
]
Revision: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="REV", help="Branch, tag or commit of a Hub repository."),
]
Backend: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="AITER_PREP_BACKEND",
        metavar="NAME",
        help="What moves the bytes: cpu (numpy), torch, aiter (on ROCm), or auto: aiter where it "
        "can run, else cpu. The bytes stay the same.",
    ),
]
Device: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="AITER_PREP_DEVICE",
        metavar="NAME",
        help="The device that the backend uses, such as cuda:0 (ROCm's name for it, too).",
    ),
]
DeviceMemory: TypeAlias = Annotated[
    str,
    typer.Option(
        "--device-memory",
        envvar="AITER_PREP_DEVICE_MEMORY",
        metavar="SIZE",
        help="Most of a GPU's memory that the backend takes.",
    ),
]
Engine: TypeAlias = Annotated[
    str,
    typer.Option(
        "--engine",
        envvar="AITER_PREP_ENGINE",
        metavar="NAME",
        help="Who works: local, this process; or ray, the nodes of a Ray cluster that share the "
        "filesystem, with --workers CPUs for each task.",
    ),
]
RayAddress: TypeAlias = Annotated[
    str,
    typer.Option(
        "--ray-address",
        envvar="AITER_PREP_RAY_ADDRESS",
        metavar="ADDRESS",
        help="The Ray cluster; auto: the one that this machine belongs to.",
    ),
]
Ranks: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="AITER_PREP_RANKS",
        metavar="LIST",
        help="Write the shards of these ranks only, such as 0-3,7.",
    ),
]
Part: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--part",
        envvar="AITER_PREP_PART",
        metavar="I/N",
        help="Write part I of N only, as 3/8; `aiter-prep seal` completes the folder. auto: what "
        "the Slurm array says; auto/N: also what the Kubernetes Indexed Job says.",
    ),
]
IfNeeded: TypeAlias = Annotated[
    bool,
    typer.Option("--if-needed", help="Do nothing where OUT holds exactly this conversion already."),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show the whole plan and write nothing.")
]
Resume: TypeAlias = Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run.")]
Overwrite: TypeAlias = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace a prepared or unfinished folder, and nothing else."),
]
AsCommon: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--as-common",
        metavar="PATTERN",
        help="Copy tensors of such names (* and ?) though no rule knows them; repeatable.",
    ),
]
TrustTensors: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--trust-tensors",
        envvar="AITER_PREP_TRUST_TENSORS",
        help="Go on where the config promises another scheme than the tensors have.",
    ),
]
Stream: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="Fetch the shards of a Hub source while it is converted, and delete each behind its "
        "last use.",
    ),
]
StreamDisk: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--stream-disk",
        envvar="AITER_PREP_STREAM_DISK",
        metavar="SIZE",
        help="Most of the source that a process has on the disk at a time; 50GB by default.",
    ),
]
Push: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--push",
        metavar="REPO",
        help="Then verify the folder and push it to the Hub, org/name, or to s3://BUCKET/FOLDER.",
    ),
]


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, read and checked; the fields are the flags."""

    source: str
    out: Path | None
    sharings: tuple[Sharing, ...]
    options: Mapping[str, str]
    fuse_shared_experts: bool
    gfx: str | None
    target: str
    revision: str | None
    max_shard_bytes: int
    backend: str
    device: str | None
    device_memory: int
    workers: int | None
    ranks: tuple[int, ...] | None
    part: str | None
    if_needed: bool
    engine: str
    ray_address: str
    resume: bool
    overwrite: bool
    as_common: tuple[str, ...]
    trust_tensors: bool
    push: str | None
    private: bool
    stream: bool
    stream_disk: int | None
