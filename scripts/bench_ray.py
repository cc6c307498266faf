"""Measures what Ray costs: how long a plan's bundles take to schedule when nothing is done.

python scripts/bench_ray.py SOURCE [--ep N | --tp N] [--max-shard-bytes N] [--nodes N]

Starts a cluster of nodes of one CPU on this machine, sends the plan of SOURCE to it, and runs a
task for every bundle, which does nothing: what is left is what Ray costs.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from aiter_prep.execution.bundles import Bundle, bundles_of, divided, shared_out
from aiter_prep.execution.ray_run import MAX_TASKS, Settings, connected, run_tasks
from aiter_prep.execution.sharing import Conversion, Share, shared_conversion
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint


def do_nothing(_plan: Conversion, bundles: Sequence[Bundle], _settings: Settings) -> Share:
    """Return at once; what is measured is the way here and back."""
    return Share({}, sum(bundle.total_bytes for bundle in bundles), 0)


def main() -> int:
    """Print the measures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--max-shard-bytes", type=int, default=5_000_000_000)
    parser.add_argument("--nodes", type=int, default=2)
    arguments = parser.parse_args()
    from ray.cluster_utils import Cluster

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
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(arguments.nodes):
        cluster.add_node(num_cpus=1)
    lap("start the cluster")
    with connected(cluster.address) as ray:
        lap("connect")
        run_tasks(ray, conversion, bundles[-2:], Settings(), do_nothing)
        lap("first tasks")
        run_tasks(ray, conversion, bundles, Settings(), do_nothing)
        lap("all tasks")
    cluster.shutdown()
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
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
