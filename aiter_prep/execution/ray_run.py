"""Carries out a plan on a Ray cluster: a task a bundle, on nodes that share the filesystem."""

from __future__ import annotations

import platform
import signal
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.backends.table import Backend, choose_backend
from aiter_prep.errors import AiterPrepError, DataMismatch
from aiter_prep.execution.bundles import Bundle, bundles_of, divided, shared_out
from aiter_prep.execution.fingerprint import code_digest
from aiter_prep.execution.record import shard_digest
from aiter_prep.execution.run import layouts_of
from aiter_prep.execution.sealing import seal_conversion
from aiter_prep.execution.sharing import Conversion, Share, shared_conversion, write_bundles
from aiter_prep.progress import Progress
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.parts import PartsFolder, check_room_for_parts
from aiter_prep.storage.threads import checked_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aiter_prep.manifest import Manifest
    from aiter_prep.plan.make import Plan

AUTO_ADDRESS = "auto"
MAX_TASKS = 4000  # more bundles than that share tasks: Ray takes about a millisecond for each
READY_AT_ONCE = 1000
MAX_RETRIES = 10  # of a task whose node or process was lost; a task that fails is not tried again
POLL_SECONDS = 0.5
KNOCK_SECONDS = 10.0
SETTLE_SECONDS = 120.0  # clients of NFS may see a new name a minute late

HINT = "what is finished stays: mend the cause and run the same command again"


@dataclass(frozen=True, slots=True)
class Settings:
    """What every task runs with.

    Attributes:
        backend: Name of the backend, chosen anew on each node.
        device: Its device, or None.
        device_memory: Most bytes that it takes of a GPU's memory, or None for its default.
        workers: Threads, and the CPUs that Ray sets aside for the task.
        gpus: GPUs that Ray sets aside for the task; may be a fraction.
        layouts: The layouts that the backend will be asked for; those of the plan.
    """

    backend: str = "auto"
    device: str | None = None
    device_memory: int | None = None
    workers: int = 1
    gpus: float = 0.0
    layouts: tuple[str, ...] = ()


def execute_on_ray(
    plan: Plan,
    out: str | Path,
    *,
    address: str = AUTO_ADDRESS,
    settings: Settings | None = None,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Write the prepared folder that a plan describes, with the nodes of a Ray cluster.

    A task writes the shards of one bundle, as a part does. When its node is lost, Ray runs it
    again elsewhere; what it had finished stays. So does all that was finished when this call
    fails or is killed: the same call goes on.

    Args:
        plan: From `make_plan`.
        out: The folder to write, under the same path on every node.
        address: The cluster, as `ray.init` takes it; `auto` is the one of this machine.
        settings: What every task runs with.
        overwrite: Replace a prepared folder: it stays as it is until the new one is sealed.
        progress: Called now and then, with bytes of the result.

    Raises:
        OutputNotEmpty: `out` holds something else, or parts of another plan.
        AiterPrepError: Ray is not installed, or there is no such cluster; the disk is full or
            fails.
        DataMismatch: Two nodes wrote different bytes, or do not share the folder.
        BadSource, NoRule: As `execute`.
    """
    settings = replace(settings or Settings(), layouts=layouts_of(plan))
    checked_workers(settings.workers)
    # nodes work in other folders than this process does
    folder = plan.checkpoint.folder.absolute()
    plan = replace(plan, checkpoint=replace(plan.checkpoint, folder=folder))
    conversion = shared_conversion(plan, Path(out).absolute(), overwrite=overwrite)
    check_room_for_parts(conversion.place)
    parts = PartsFolder(conversion.place, conversion.digest)
    left = [bundle for bundle in bundles_of(plan) if not _is_written(parts, bundle)]
    with connected(address) as ray:
        shares = run_tasks(ray, conversion, left, settings, write_task, progress)
    _await_shards(conversion, parts, shares)
    manifest = seal_conversion(conversion)
    if plan.checkpoint.remote is not None:
        plan.checkpoint.remote.clear()
    return manifest


def write_task(conversion: Conversion, bundles: Sequence[Bundle], settings: Settings) -> Share:
    """Write some bundles, in a process of the cluster.

    Raises:
        DataMismatch: The node has another version of this program than the run.
        As `write_bundles`.
    """
    if conversion.request["facts"]["code"] != code_digest():
        raise DataMismatch(
            f"node `{platform.node()}` has another version of aiter-prep than the machine that "
            "runs the conversion",
            "install the same one on every node",
        )
    backend = _backend(settings)
    label = f"task-{bundles[0].files[0]}"
    return write_bundles(conversion, bundles, label, backend, settings.workers)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a cluster while the context is open, unless this process is connected already.

    Raises:
        AiterPrepError: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ImportError:
        raise AiterPrepError(
            "--engine ray needs the package `ray`, which is not installed",
            "install it here and on every node: pip install 'aiter-prep[ray]'",
        ) from None
    if ray.is_initialized():
        yield ray
        return
    try:
        _knock(address)
        with _own_signals():
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as fault:
        raise AiterPrepError(
            f"there is no Ray cluster at `{printable(address)}`: {printable(str(fault))}",
            "start one with `ray start --head`, or name its address with --ray-address",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def run_tasks(
    ray: Any,
    conversion: Conversion,
    bundles: Sequence[Bundle],
    settings: Settings,
    act: Callable[[Conversion, Sequence[Bundle], Settings], Share],
    progress: Callable[[Progress], None] | None = None,
) -> list[Share]:
    """Run an act for bundles, as tasks of one or more; the first that fails ends the others.

    A task is sent no more than its own piece of the plan.

    Args:
        ray: The module, connected.
        conversion: The conversion.
        bundles: What to run it for; those of a task have little in common but their size.
        settings: What to run it with.
        act: A function of a module that the nodes have.
        progress: Called now and then, with bytes of the bundles.

    Raises:
        AiterPrepError: What a task raised; or a node was lost more often than is tried again.
    """
    total_bytes = sum(bundle.total_bytes for bundle in bundles)
    task = ray.remote(num_cpus=settings.workers, num_gpus=settings.gpus, max_retries=MAX_RETRIES)(
        act
    )
    groups = shared_out(bundles, min(len(bundles), MAX_TASKS))
    pending = {
        task.remote(replace(conversion, plan=piece), group, settings)
        for piece, group in zip(divided(conversion.plan, groups), groups, strict=True)
    }
    shares: list[Share] = []
    try:
        while pending:
            at_most = min(len(pending), READY_AT_ONCE)
            ready, _ = ray.wait(list(pending), num_returns=at_most, timeout=POLL_SECONDS)
            shares += [_result(ray, reference) for reference in ready]
            pending.difference_update(ready)
            if progress is not None:
                done_bytes = sum(share.total_bytes for share in shares)
                progress(Progress(done_bytes, total_bytes, len(shares), len(groups)))
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)
    return shares


@lru_cache(maxsize=1)
def _backend(settings: Settings) -> Backend:
    memory = {} if settings.device_memory is None else {"device_memory": settings.device_memory}
    return choose_backend(settings.backend, settings.device, layouts=settings.layouts, **memory)[0]


def _result(ray: Any, reference: Any) -> Share:
    """Return what a task wrote.

    Raises:
        AiterPrepError: It failed, or was lost.
    """
    try:
        share: Share = ray.get(reference)
    except ray.exceptions.RayTaskError as fault:
        if isinstance(fault.cause, AiterPrepError):
            raise fault.cause from None
        raise AiterPrepError(
            f"a task of Ray failed: {printable(str(fault.cause))}", HINT
        ) from fault
    except ray.exceptions.RayError as fault:
        what = printable(str(fault).partition("\n")[0])
        raise AiterPrepError(
            f"a task of Ray was lost {MAX_RETRIES + 1} times: {what}", HINT
        ) from None
    return share


def _is_written(parts: PartsFolder, bundle: Bundle) -> bool:
    return all(parts.note_of(shard.layout) is not None for shard in bundle.shards)


def _await_shards(conversion: Conversion, parts: PartsFolder, shares: Sequence[Share]) -> None:
    """Wait until the shards that other nodes have written are seen here as they wrote them.

    Raises:
        DataMismatch: They are not.
    """
    digests = {file: digest for share in shares for file, digest in share.digests.items()}
    deadline = time.monotonic() + SETTLE_SECONDS
    for shard in conversion.plan.shards:
        while (note := parts.note_of(shard.layout)) is None:
            if time.monotonic() > deadline:
                raise DataMismatch(
                    f"`{printable(shard.file)}` was written by a node, but is not to be seen in "
                    f"`{printable(str(conversion.out))}`",
                    "every node needs the same shared filesystem under the same path",
                )
            time.sleep(POLL_SECONDS)
        if digests.get(shard.file) not in {None, shard_digest(shard, note.tensors)}:
            raise DataMismatch(
                f"two nodes wrote different bytes for `{printable(shard.file)}`",
                "nothing was sealed: find the node whose memory or program is at fault",
            )


def _knock(address: str) -> None:
    """Check that somebody listens; Ray itself would go on trying for minutes.

    Raises:
        OSError: Nobody does.
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of signals; Ray puts its own in their place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
