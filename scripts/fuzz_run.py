"""Fuzzes one reader for a number of executions: by atheris, by hypothesis, or by mutation."""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import sys
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

MAX_MB = 200
MAX_SECONDS = 5.0


def main() -> int:
    """Run one target; return 1 if it found something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--runs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--engine", choices=("atheris", "hypothesis", "mutation"), required=True)
    options = parser.parse_args()
    options.corpus.mkdir(parents=True, exist_ok=True)
    engines = {"atheris": _atheris, "hypothesis": _hypothesis, "mutation": _mutation}
    return engines[options.engine](options)


def _manifests() -> list[bytes]:
    """Return manifests of a few tensors, each of another kind."""
    import shutil
    import tempfile

    from prepared import load, sealed, small

    folder = Path(tempfile.mkdtemp())
    try:
        documents = [load(small(folder / kind, kind)[1]) for kind in _KINDS]
    finally:
        shutil.rmtree(folder)
    for document in documents:
        kinds = {(tensor["rank"], tensor["form"]): tensor for tensor in document["tensors"]}
        document["tensors"] = list(kinds.values())[-3:]
    return [sealed(document) for document in documents]


_KINDS = ("mxfp4_quark", "fp8_tensor")


def _mutation(options: argparse.Namespace) -> int:
    import fuzzing

    target = fuzzing.TARGETS[options.target]
    honest = fuzzing.seeds(options.target, _manifests() if options.target == "manifest" else ())
    honest += [path.read_bytes() for path in sorted(options.corpus.glob("find-*"))]
    rng = random.Random(options.seed)  # noqa: S311 - no secret
    before = _peak_mb()
    begin = time.monotonic()
    slowest = 0.0
    for number in range(options.runs):
        data = fuzzing.mutated(rng.choice(honest), rng)
        if rng.random() < 0.3:  # noqa: PLR2004 - a lie upon a lie
            data = fuzzing.mutated(data, rng)
        start = time.process_time()
        try:
            target(data)
        except Exception as fault:  # noqa: BLE001 - any is a find
            return _found(options, data, repr(fault), fault.__traceback__)
        slowest = max(slowest, time.process_time() - start)
        if slowest > MAX_SECONDS:
            return _found(options, data, f"{slowest:.1f} s", None)
        if not number % 1000 and _peak_mb() - before > MAX_MB:
            return _found(options, data, f"{_peak_mb() - before} MB", None)
    seconds = time.monotonic() - begin
    sys.stdout.write(
        f"{options.target}: {options.runs} executions by mutation in {seconds:.0f} s, nothing "
        f"found; slowest {slowest * 1000:.0f} ms, memory +{_peak_mb() - before} MB\n"
    )
    return 0


def _hypothesis(options: argparse.Namespace) -> int:
    from hypothesis import HealthCheck, given, seed, settings

    import fuzzing

    target = fuzzing.TARGETS[options.target]
    manifests = _manifests() if options.target == "manifest" else ()
    before = _peak_mb()
    begin = time.monotonic()
    executions = 0
    last = b""

    @seed(options.seed)
    @settings(
        max_examples=options.runs,
        deadline=MAX_SECONDS * 1000,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(fuzzing.documents(options.target, manifests))
    def run(data: bytes) -> None:
        nonlocal executions, last
        executions, last = executions + 1, data
        target(data)

    try:
        run()
    except Exception as fault:  # noqa: BLE001 - any is a find
        return _found(options, last, repr(fault), fault.__traceback__)
    if _peak_mb() - before > MAX_MB:
        return _found(options, last, f"{_peak_mb() - before} MB", None)
    seconds = time.monotonic() - begin
    sys.stdout.write(
        f"{options.target}: {executions} executions by hypothesis in {seconds:.0f} s, nothing "
        f"found; memory +{_peak_mb() - before} MB\n"
    )
    return 0


def _found(options: argparse.Namespace, data: bytes, what: str, trace: TracebackType | None) -> int:
    import traceback

    path = options.corpus / f"find-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    sys.stdout.write(f"{options.target}: FOUND {what}: {path}\n")
    traceback.print_tb(trace)
    return 1


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _atheris(options: argparse.Namespace) -> int:
    import atheris  # type: ignore[import-not-found,unused-ignore]

    with atheris.instrument_imports(include=["aiter_prep", "json"]):
        import fuzzing
    seeds = fuzzing.seeds(options.target, _manifests() if options.target == "manifest" else ())
    for number, data in enumerate(seeds):
        (options.corpus / f"seed-{number}").write_bytes(data)
    arguments = [
        sys.argv[0],
        str(options.corpus),
        f"-runs={options.runs}",
        f"-seed={options.seed}",
        f"-rss_limit_mb={_peak_mb() + MAX_MB}",
        f"-timeout={int(MAX_SECONDS)}",
        "-max_len=8192",
        "-print_final_stats=1",
        f"-dict={_dictionary(options.corpus.parent, seeds)}",
        f"-artifact_prefix={options.corpus}/find-",
    ]
    atheris.Setup(arguments, fuzzing.TARGETS[options.target])
    atheris.Fuzz()  # leaves the process
    return 0


def _dictionary(folder: Path, seeds: list[bytes]) -> Path:
    """Write the words of honest inputs, for the fuzzer to put elsewhere."""
    import re

    words = {
        word
        for data in seeds
        for word in re.findall(rb'"[\x20\x21\x23-\x5b\x5d-\x7e]{1,60}"', data)
    }
    words |= {b"1e999", b"[[[[[[[[", b"9223372036854775808", b"null", b"true", b"\\ud800", b"{}"}
    lines = (b'"' + word.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"' for word in words)
    path = folder / "words.dict"
    path.write_bytes(b"\n".join(sorted(lines)) + b"\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
