"""Measures what Ray brings and what it costs; see scripts/bench-ray."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench import Bench, model, say, warm

from aiter_prep.execution import execute
from aiter_prep.execution.bundles import Bundle, bundles_of, divided, shared_out
from aiter_prep.execution.ray_run import (
    MAX_TASKS,
    Settings,
    connected,
    execute_on_ray,
    run_tasks,
)
from aiter_prep.execution.sharing import Conversion, Share, shared_conversion
from aiter_prep.plan import Plan, make_plan
from aiter_prep.storage.checkpoint import open_checkpoint

INTERMEDIATE = 1024
TP = 8
ONE_NODE = 2  # kinds of conversions that are measured beside one node
SHARD_BYTES = 14_000_000  # a layer's share of a rank: a task is a layer, as in a large model


def do_nothing(_plan: Conversion, bundles: Sequence[Bundle], _settings: Settings) -> Share:
    """Return at once; what is measured is the way here and back."""
    return Share({}, sum(bundle.total_bytes for bundle in bundles), 0)


@contextmanager
def cluster_of(nodes: int) -> Iterator[Any]:
    """Run a cluster of a head without CPUs and nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


# --- speed-up -----------------------------------------------------------------------------------


def speedup(arguments: argparse.Namespace) -> None:
    """Convert one model here and on clusters in turn; print medians of seconds and of ratios."""
    with (
        tempfile.TemporaryDirectory(prefix="aiter-prep-bench-", dir=arguments.dir) as folder,
        model(Path(folder), "mxfp4", arguments.layers, INTERMEDIATE) as bench,
    ):
        plan = make_plan(
            open_checkpoint(bench.source), tp=TP, gfx="gfx950", max_shard_bytes=SHARD_BYTES
        )
        tasks = len(bundles_of(plan))
        say(f"{bench.gb:.2f} GB, tp {TP}, {len(plan.shards)} shards, {tasks} tasks")
        for nodes in arguments.nodes:
            with cluster_of(nodes) as cluster, connected(cluster.address) as ray:
                _wake(ray, plan, nodes)
                rounds = [_round(bench, plan, nodes) for _ in range(arguments.repeats)]
            _report(rounds, tasks)


def _round(bench: Bench, plan: Plan, nodes: int) -> dict[str, float]:
    """Return the seconds of a conversion of each kind."""
    workers = sorted({1, nodes})
    taken = {
        f"here, {count} worker{'s' * (count > 1)}": _timed(
            bench, lambda count=count: execute(plan, bench.out, workers=count)
        )
        for count in workers
    }
    name = f"Ray, {nodes} node{'s' * (nodes > 1)}"
    return {**taken, name: _timed(bench, lambda: execute_on_ray(plan, bench.out))}


def _report(rounds: Sequence[dict[str, float]], tasks: int) -> None:
    """Print the medians of one number of nodes, beside one worker here."""
    base, *_, on_ray = rounds[0]
    for name in rounds[0]:
        taken = [measured[name] for measured in rounds]
        ratios = sorted(measured[name] / measured[base] for measured in rounds)
        say(
            f"{name:16} {median(taken):6.2f} s ({min(taken):.2f} to {max(taken):.2f}), ratio to "
            f"{base}: {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    if len(rounds[0]) == ONE_NODE:
        more = median((measured[on_ray] - measured[base]) / tasks for measured in rounds)
        say(f"more for each task than here: {1000 * more:.0f} ms")


def _wake(ray: Any, plan: Plan, nodes: int) -> None:
    """Have every node start its process and import the program, as it does for the first task."""
    conversion = Conversion(plan, Path(), Path(), "", {})
    bundles = bundles_of(plan)[: 4 * nodes]
    found: set[str] = set()
    while len(found) < nodes:
        shares = run_tasks(ray, conversion, bundles, Settings(), take_a_moment)
        found |= {node for share in shares for node in share.digests.values()}


def take_a_moment(_plan: Conversion, _bundles: Sequence[Bundle], _settings: Settings) -> Share:
    """Sleep; return the node."""
    import ray

    time.sleep(0.2)
    return Share({"": ray.get_runtime_context().get_node_id()}, 0, 0)


def _timed(bench: Bench, convert: Callable[[], None]) -> float:
    """Return seconds of a conversion into an empty folder, the source in memory."""
    bench.clear()
    warm(bench.source)
    start = time.perf_counter()
    convert()
    return time.perf_counter() - start


# --- schedule -----------------------------------------------------------------------------------


def schedule(arguments: argparse.Namespace) -> None:
    """Send a plan to a cluster whose tasks do nothing; print the measures as JSON."""
    seconds: dict[str, float] = {}
    start = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        now = time.perf_counter()
        seconds[name] = round(now - start, 2)
        start = now

    checkpoint = open_checkpoint(arguments.source)
    lap("read headers")
    plan = make_plan(
        checkpoint,
        tp=arguments.tp,
        ep=arguments.ep,
        max_shard_bytes=arguments.max_shard_bytes,
    )
    lap("plan")
    with tempfile.TemporaryDirectory() as folder:
        conversion = shared_conversion(plan, Path(folder) / "out")
    lap("facts")
    bundles = bundles_of(plan)
    pieces = divided(plan, shared_out(bundles, min(len(bundles), MAX_TASKS)))
    lap("divide")
    sent = sum(len(pickle.dumps(piece, protocol=5)) for piece in pieces)
    lap("pickle")
    with cluster_of(arguments.nodes) as cluster:
        lap("start the cluster")
        with connected(cluster.address) as ray:
            lap("connect")
            run_tasks(ray, conversion, bundles[-2:], Settings(), do_nothing)
            lap("first tasks")
            run_tasks(ray, conversion, bundles, Settings(), do_nothing)
            lap("all tasks")
    tasks = min(len(bundles), MAX_TASKS)
    report = {
        "steps": sum(len(s.steps) for b in plan.blocks for s in b.stacks) + len(plan.common),
        "shards": len(plan.shards),
        "bundles": len(bundles),
        "tasks": tasks,
        "sent_bytes": sent,
        "milliseconds_per_task": round(1000 * seconds["all tasks"] / tasks, 2),
        "seconds": seconds,
    }
    say(json.dumps(report, indent=2))


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="scripts/bench-ray")
    what = parser.add_subparsers(required=True)
    faster = what.add_parser("speedup")
    faster.set_defaults(run=speedup)
    faster.add_argument("--dir", type=Path, default=None)
    faster.add_argument("--repeats", type=int, default=5)
    faster.add_argument("--layers", type=int, default=12)
    faster.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    scheduled = what.add_parser("schedule")
    scheduled.set_defaults(run=schedule)
    scheduled.add_argument("source", type=Path)
    scheduled.add_argument("--tp", type=int, default=1)
    scheduled.add_argument("--ep", type=int, default=1)
    scheduled.add_argument("--max-shard-bytes", type=int, default=5_000_000_000)
    scheduled.add_argument("--nodes", type=int, default=2)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
