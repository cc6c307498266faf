"""Kills conversions at many points and checks what they leave."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import crashes
import turns
from faults import Fault


def main() -> int:
    """Run the whole test; return 1 if a kill left what it should not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points", nargs="?", type=int, default=200)
    parser.add_argument("--overwrite-points", type=int, default=60)
    turns.add_argument(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aiter-prep-crash-") as place:
        scene = crashes.Scene(Path(place))
        calls = scene.calls(scene.convert)
        faults = list(options.turn.of(crashes.points(calls, options.points)))
        failures = _run("convert", scene, crashes.check_kill, calls, faults)
        for scene.exchange in (True, False):
            scene.clear()
            scene.convert(tp=1)
            calls = scene.calls(lambda: scene.convert(overwrite=True))
            faults = list(options.turn.of(crashes.points(calls, options.overwrite_points)))
            what = f"convert --overwrite, exchange {scene.exchange}"
            failures += _run(what, scene, crashes.check_kill_of_overwrite, calls, faults)
    return 1 if failures else 0


def _run(
    what: str,
    scene: crashes.Scene,
    check: Callable[[crashes.Scene, Fault], bool],
    calls: Sequence[str],
    faults: Sequence[Fault],
) -> int:
    begin = time.monotonic()
    killed = failures = 0
    for fault in faults:
        try:
            killed += check(scene, fault)
        except Exception:  # noqa: BLE001, PERF203 - each is a failure of the test
            failures += 1
            call = calls[min(fault.at, len(calls)) - 1]
            sys.stdout.write(f"FAILED: {what}: {fault.action.__name__} {call} ({fault.at})\n")
            traceback.print_exc()
    sys.stdout.write(
        f"{what}: {len(faults)} points in {len(calls)} system calls, {killed} killed in time, "
        f"{failures} failures, {time.monotonic() - begin:.0f} s\n"
    )
    return failures


if __name__ == "__main__":
    sys.exit(main())
