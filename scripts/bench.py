"""Measures convert, verify and restore beside what they compete with; see scripts/bench."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
PROGRAM = Path(sys.executable).with_name("aiter-prep")
EXPERTS, HIDDEN, INTERMEDIATE, TP = 32, 2048, 2048, 8
MODELS = {"mxfp4": "mxfp4_quark", "fp8_block": "fp8_block_f32", "bf16": "bf16"}
BYTES_PER_WEIGHT = {"mxfp4": 17 / 32, "fp8_block": 1.0, "bf16": 2.0}
GB = 1e9


@dataclass(frozen=True)
class Cost:
    """What a process took.

    Attributes:
        seconds: From its start to its end.
        cpu: Seconds of processor time.
        peak: Most bytes of resident memory.
        is_killed: Whether it came to no end, for want of memory.
    """

    seconds: float
    cpu: float
    peak: int
    is_killed: bool = False


KILLED = -9


class MemoryLimit:
    """A memory cgroup, version 1 or 2, for the programs that are measured; needs root.

    Args:
        gb: Its size: memory of the programs, and of the page cache that they fill.
    """

    def __init__(self, gb: float) -> None:
        root, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        if not root.is_dir():
            root, limit = Path("/sys/fs/cgroup"), "memory.max"
        self._folder = root / f"aiter-prep-bench-{os.getpid()}"
        self._folder.mkdir()
        (self._folder / limit).write_text(str(round(gb * GB)))
        self.gb = gb

    def enter(self) -> None:
        """Move the calling process into it."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        """Remove it, when its processes have ended."""
        self._folder.rmdir()


def run(*command: object, limit: MemoryLimit | None = None) -> Cost:
    """Run a program; say what it said where it failed, unless a memory limit had it killed."""
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        words = [str(word) for word in command]
        enter = None if limit is None else limit.enter
        process = subprocess.Popen(  # noqa: S603 our own words
            words,
            stdout=said,
            stderr=said,
            preexec_fn=enter,  # noqa: PLW1509 one thread
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        is_killed = process.returncode == KILLED and limit is not None
        if process.returncode and not is_killed:
            said.seek(0)
            sys.exit(f"failed: {command}\n{said.read().decode(errors='replace')[-4000:]}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, is_killed)


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201 a program that prints


class Bench:
    """One model in a folder, and what is made of it.

    Args:
        folder: Where everything lies.
        kind: A name of `MODELS`.
        layers: Its size.
        intermediate: Columns of an expert's down projection.
    """

    def __init__(self, folder: Path, kind: str, layers: int, intermediate: int) -> None:
        self.folder = folder
        self.kind = kind
        self.source, self.out = folder / "source", folder / "out"
        make = "import sys; import synthetic, tiny; from pathlib import Path; a = sys.argv;"
        make += "synthetic.write_model(Path(a[1]), tiny.Model(a[2], experts=int(a[3]), "
        make += "layers=int(a[4]), hidden=int(a[5]), intermediate=int(a[6])))"
        os.environ["PYTHONPATH"] = str(HERE.parent / "tests")
        sizes = (EXPERTS, layers, HIDDEN, intermediate)
        run(sys.executable, "-c", make, self.source, MODELS[kind], *sizes)
        self.gb = size_of(self.source) / GB
        settle()

    def close(self) -> None:
        """Remove the model."""
        shutil.rmtree(self.source)
        self.clear()

    def clear(self) -> None:
        """Remove what was made of the model, and let the disk come to rest."""
        for name in ("copy", "out", "naive", "back"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        settle()

    def copy(self) -> Cost:
        """Copy the source with `cp -r` and sync the copies."""
        self.clear()
        start = time.perf_counter()
        cost = run("cp", "-r", self.source, self.folder / "copy")
        for file in (self.folder / "copy").iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        return Cost(time.perf_counter() - start, cost.cpu, cost.peak)

    def convert(self, tp: int = TP, limit: MemoryLimit | None = None) -> Cost:
        """Convert, digests and syncs included."""
        self.clear()
        command = (PROGRAM, "convert", self.source, self.out, "--tp", tp, "--gfx", "gfx950")
        return run(*command, "--quiet", limit=limit)

    def naive(self, limit: MemoryLimit | None = None) -> Cost:
        """Run the script that people write."""
        self.clear()
        script = HERE / "bench_naive.py"
        return run(sys.executable, script, self.source, self.folder / "naive", TP, limit=limit)

    def verify(self, *more: object) -> Cost:
        """Verify what was converted last."""
        return run(PROGRAM, "verify", self.out, "--quiet", *more)

    def restore(self) -> Cost:
        """Restore what was converted last."""
        shutil.rmtree(self.folder / "back", ignore_errors=True)
        return run(PROGRAM, "restore", self.out, self.folder / "back", "--quiet")

    def cat(self) -> Cost:
        """Read what was converted last once."""
        files = sorted(path for path in self.out.iterdir() if path.is_file())
        return run("sh", "-c", 'cat "$@" > /dev/null', "sh", *files)


def size_of(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def settle() -> None:
    """Wait until nothing is left to write, so that no measurement pays for another."""
    os.sync()
    time.sleep(1)


def warm(folder: Path) -> None:
    """Read every file, so that memory holds it."""
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(1 << 20)
            while file.readinto(buffer):
                pass


def cool(folder: Path) -> None:
    """Have the kernel forget every file."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(
    title: str, repeats: int, ours: Callable[[], Cost], theirs: Callable[[], Cost], goal: str
) -> None:
    """Measure pairs; print the medians, and the median of the ratios."""
    pairs = [(theirs(), ours()) for _ in range(repeats)]
    their, our = (median(cost.seconds for cost in side) for side in zip(*pairs, strict=True))
    ratios = sorted(our.seconds / their.seconds for their, our in pairs)
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    cpu = median(our.cpu for _, our in pairs)
    say(
        f"{title:44} {our:7.2f} s {their:7.2f} s  ratio {median(ratios):5.2f} ({spread}; goal "
        f"{goal}), cpu {cpu:.2f} s"
    )


def prepared(measure: Callable[[], Cost], prepare: Callable[[], None]) -> Callable[[], Cost]:
    """Return a measurement that has something done before its clock starts."""

    def run_both() -> Cost:
        prepare()
        return measure()

    return run_both


def copy_goal(bench: Bench, repeats: int) -> None:
    """Compare convert with a copy, the source in memory and not."""
    for state, prepare in (("warm", warm), ("cold", cool)):

        def set_source(prepare: Callable[[Path], None] = prepare) -> None:
            bench.clear()
            prepare(bench.source)

        compare(
            f"{bench.kind} {bench.gb:.1f} GB {state}: convert, cp -r + sync",
            repeats,
            prepared(bench.convert, set_source),
            prepared(bench.copy, set_source),
            "<= 1.3",
        )


def naive_goal(bench: Bench, repeats: int) -> None:
    """Compare convert with the script that people write."""
    warm(bench.source)
    compare(
        f"{bench.kind} {bench.gb:.1f} GB: naive script, convert",
        repeats,
        bench.naive,
        bench.convert,
        ">= 4, >= 8 where memory hurts",
    )
    say(f"{'':44} peak of the naive script: {bench.naive().peak / GB:.2f} GB")


def limited_goal(bench: Bench, repeats: int, gb: float) -> None:
    """Compare convert with the script where there is not much memory; the source starts on disk."""
    limit = MemoryLimit(gb)
    try:
        pairs = []
        for _ in range(repeats):
            sides = []
            for side in (bench.naive, bench.convert):
                bench.clear()
                cool(bench.source)
                sides.append(side(limit=limit))
            pairs.append(sides)
    finally:
        limit.close()
    title = f"{bench.kind} {bench.gb:.1f} GB in {gb:g} GB of memory: naive script, convert"
    for theirs, ours in pairs:
        said = " and was killed for want of memory" if theirs.is_killed else ""
        ratio = theirs.seconds / ours.seconds
        say(f"{title}: {theirs.seconds:.2f} s{said}, {ours.seconds:.2f} s, {ratio:.1f} times")


def verify_goal(bench: Bench, repeats: int) -> None:
    """Compare verify with reading, and verify --source with convert."""
    warm(bench.source)
    bench.convert()

    def set_out() -> None:
        warm(bench.out)

    compare(
        f"{bench.kind} {bench.gb:.1f} GB warm: verify, cat",
        repeats,
        prepared(bench.verify, set_out),
        prepared(bench.cat, set_out),
        "<= 1.2",
    )
    compare(
        f"{bench.kind} {bench.gb:.1f} GB: verify --source, convert",
        repeats,
        lambda: bench.verify("--source", bench.source),
        bench.convert,
        "<= 1.5",
    )


def memory_goal(bench: Bench, _repeats: int) -> None:
    """Print the peak of resident memory of every verb."""
    for tp in (1, 8, 16):
        peaks = {"convert": bench.convert(tp), "verify": bench.verify()}
        peaks |= {"verify --source": bench.verify("--source", bench.source)}
        peaks |= {"restore": bench.restore()}
        shown = ", ".join(f"{verb} {cost.peak / 1e6:.0f} MB" for verb, cost in peaks.items())
        say(f"{bench.kind} {bench.gb:.1f} GB tp {tp}: peak {shown} (goal < 600 MB)")


GOALS = {"copy": copy_goal, "naive": naive_goal, "verify": verify_goal, "memory": memory_goal}


def scaling_goal(folder: Path, kind: str, layers: int, repeats: int) -> None:
    """Show that cost grows with the bytes and not with the ranks."""
    for part in (1 / 8, 1 / 4, 1 / 2, 1):
        with model(folder, kind, max(1, round(layers * part))) as bench:
            warm(bench.source)
            costs = [bench.convert() for _ in range(repeats)]
            show_rate(f"{bench.kind} {bench.gb:.2f} GB tp {TP}", bench, costs)
            if part == 1:
                for tp in (1, 2, 4, 16):
                    costs = [bench.convert(tp) for _ in range(repeats)]
                    show_rate(f"{bench.kind} {bench.gb:.2f} GB tp {tp}", bench, costs)


def show_rate(title: str, bench: Bench, costs: list[Cost]) -> None:
    """Print what a gigabyte of the source costs."""
    seconds, cpu = median(c.seconds for c in costs), median(c.cpu for c in costs)
    written = size_of(bench.out) / GB
    say(
        f"{title}: {seconds:.2f} s, {seconds / bench.gb:.2f} s and {cpu / bench.gb:.2f} cpu s a GB,"
        f" {written:.2f} GB written"
    )


@contextlib.contextmanager
def model(
    folder: Path, kind: str, layers: int, intermediate: int = INTERMEDIATE
) -> Iterator[Bench]:
    """Make a model, and remove it."""
    bench = Bench(folder, kind, layers, intermediate)
    try:
        yield bench
    finally:
        bench.close()


def plan_goal(folder: Path, repeats: int) -> None:
    """Print what planning costs."""
    for command in (("inspect", folder), ("convert", folder, "--dry-run", "--tp", 8)):
        gfx = ("--gfx", "gfx950") if command[0] == "convert" else ()
        costs = [run(PROGRAM, *command, *gfx) for _ in range(repeats)]
        seconds, cpu = median(c.seconds for c in costs), median(c.cpu for c in costs)
        peak, least = max(c.peak for c in costs), min(c.cpu for c in costs)
        say(
            f"{' '.join(map(str, command))}: {seconds:.2f} s, {cpu:.2f} cpu s (at least "
            f"{least:.2f}), peak {peak / 1e6:.0f} MB"
        )


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="scripts/bench")
    parser.add_argument("what", nargs="*", choices=[[], *GOALS, "scaling"])
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gb", type=float, default=3.0)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--intermediate", type=int, default=INTERMEDIATE)
    parser.add_argument("--memory", type=float, default=None, metavar="GB")
    parser.add_argument("--plan", type=Path, default=None)
    chosen = parser.parse_args()
    if chosen.plan is not None:
        plan_goal(chosen.plan, chosen.repeats)
        if not chosen.what:
            return
    what = chosen.what or ([] if chosen.memory else [*GOALS, "scaling"])
    with tempfile.TemporaryDirectory(prefix="aiter-prep-bench-", dir=chosen.dir) as made:
        for kind in chosen.models.split(","):
            weights = 3 * EXPERTS * HIDDEN * chosen.intermediate
            layers = round(chosen.gb * GB / weights / BYTES_PER_WEIGHT[kind] + 0.5)
            with model(Path(made), kind, layers, chosen.intermediate) as bench:
                for name in [name for name in GOALS if name in what]:
                    GOALS[name](bench, chosen.repeats)
                if chosen.memory is not None:
                    limited_goal(bench, chosen.repeats, chosen.memory)
        if "scaling" in what:
            scaling_goal(Path(made), chosen.models.split(",")[0], layers, chosen.repeats)


if __name__ == "__main__":
    main()
