"""Runs each job of an engine in a process of its own, forked after the engine was imported.

Importing an engine takes far longer than a job does. What one job imported besides, its parent
imports for those that follow, and the collector, which engines call several times a load, never
looks at any of it again.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any


def run_each(run: Callable[[Any], None], jobs: Iterable[Any]) -> None:
    """Runs the jobs one after the other; `run` writes down itself what comes of one."""
    for job in jobs:
        gc.collect()
        gc.freeze()
        receive, send = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_run, args=(run, job, send))
        child.start()
        send.close()
        with contextlib.suppress(EOFError):  # the child was killed
            _import(receive.recv())
        child.join()


def _run(run: Callable[[Any], None], job: Any, report: Connection) -> None:
    try:
        run(job)
    finally:
        report.send([name for name in sys.modules if name.startswith("vllm.")])


def _import(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
