"""Damages prepared folders, each time in one way, and puts them right again."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiter_prep.errors import AiterPrepError
from aiter_prep.storage.checkpoint import Checkpoint
from aiter_prep.verification import verify
from prepared import MANIFEST, load, reseal, sealed, spans

Step = str | int


@dataclass(frozen=True)
class Mutation:
    """One way to damage a folder.

    Attributes:
        what: What is damaged.
        apply: Does it.
        fits: Whether every digest fits again, so that only a source can tell.
    """

    what: str
    apply: Callable[[Path], None]
    fits: bool = False


def is_found(folder: Path, mutation: Mutation, source: Checkpoint) -> bool:
    """Return whether `verify` finds a mutation; the folder is put right again."""
    with _put_right(folder):
        mutation.apply(folder)
        try:
            return not verify(folder, source=source if mutation.fits else None).is_clean
        except AiterPrepError:  # refused
            return True


@contextmanager
def _put_right(folder: Path) -> Iterator[None]:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    try:
        yield
    finally:
        for path in set(folder.iterdir()) - before.keys():
            path.unlink()
        for path, data in before.items():
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)


def bit_flips(folder: Path, count: int, rng: random.Random) -> Iterator[Mutation]:
    """Yield flips of single bits, spread evenly over the bytes of every file."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    edges = list(itertools.accumulate(sizes.values()))
    for _ in range(count):
        byte, bit = rng.randrange(edges[-1]), rng.randrange(8)
        number = next(n for n, edge in enumerate(edges) if byte < edge)
        name = list(sizes)[number]
        yield _flip(name, byte - edges[number] + sizes[name], bit)


def _flip(name: str, byte: int, bit: int) -> Mutation:
    def apply(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(byte)
            old = file.read(1)[0]
            file.seek(byte)
            file.write(bytes([old ^ 1 << bit]))

    return Mutation(f"bit {bit} of byte {byte} of {name}", apply)


def of_files(folder: Path, rng: random.Random) -> Iterator[Mutation]:
    """Yield files that are cut, lengthened, removed, added, or stand in each other's place."""
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        size = (folder / name).stat().st_size
        for length in {0, 1, size // 2, size - 1, rng.randrange(size)}:
            yield _on_file(name, f"cut to {length}", partial(_cut, length))
        yield _on_file(name, "lengthened", lambda data: data + b"\0")
        yield Mutation(f"{name} removed", partial(_remove, name))
    for added in ("x", "x.safetensors", "model-rank-9-part-0.safetensors", "model.safetensors"):
        yield Mutation(f"{added} added", partial(_add, added))
    for one, other in itertools.combinations([n for n in names if n != MANIFEST], 2):
        yield Mutation(f"{one} and {other} swapped", partial(_swap, one, other))


def _cut(length: int, data: bytes) -> bytes:
    return data[:length]


def _remove(name: str, folder: Path) -> None:
    (folder / name).unlink()


def _add(name: str, folder: Path) -> None:
    (folder / name).write_bytes(b"x")


def _on_file(name: str, what: str, change: Callable[[bytes], bytes]) -> Mutation:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return Mutation(f"{name} {what}", apply)


def _swap(one: str, other: str, folder: Path) -> None:
    (folder / one).rename(folder / "between")
    (folder / other).rename(folder / one)
    (folder / "between").rename(folder / other)


def of_tensors(folder: Path, *, fits: bool) -> Iterator[Mutation]:
    """Yield tensors of one size that stand in each other's place, and tensors of zeros."""
    by_size: dict[int, list[tuple[str, str]]] = {}
    for record in load(folder)["tensors"]:
        first, last = spans(folder / record["file"])[record["name"]]
        by_size.setdefault(last - first, []).append((record["file"], record["name"]))
    pairs = [p for alike in by_size.values() for p in itertools.combinations(alike, 2)]
    for one, other in pairs:
        yield _tensor_swap(one, other, fits=fits)


def _tensor_swap(one: tuple[str, str], other: tuple[str, str], *, fits: bool) -> Mutation:
    def apply(folder: Path) -> None:
        places = [(folder / file, spans(folder / file)[name]) for file, name in (one, other)]
        data = [path.read_bytes()[slice(*span)] for path, span in places]
        if data[0] == data[1]:
            raise Alike
        for (path, span), new in zip(places, reversed(data), strict=True):
            raw = bytearray(path.read_bytes())
            raw[slice(*span)] = new
            path.write_bytes(raw)
        if fits:
            reseal(folder)

    return Mutation(f"{one[1]} of {one[0]} and {other[1]} of {other[0]} swapped", apply, fits=fits)


class Alike(Exception):
    """Two tensors hold the same bytes."""


def of_manifest(folder: Path, *, fits: bool) -> Iterator[Mutation]:
    """Yield every field of the manifest with another value: without, or with a digest that fits."""
    document = load(folder)
    for path in _leaves(document):
        if path == ("self_digest",):
            continue
        yield _edit(path, fits=fits)


def _leaves(value: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    items: Iterator[tuple[Step, Any]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(list(enumerate(value)))
    else:
        yield path
    for step, item in items:
        yield from _leaves(item, (*path, step))


def _edit(path: tuple[Step, ...], *, fits: bool) -> Mutation:
    def apply(folder: Path) -> None:
        document = load(folder)
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = _other(place[path[-1]])
        if fits:
            (folder / MANIFEST).write_bytes(sealed(document))
        else:
            text = json.dumps(document, sort_keys=True, indent=2) + "\n"
            (folder / MANIFEST).write_text(text, "utf-8")

    return Mutation(f"{'.'.join(map(str, path))} of the manifest", apply, fits=fits)


def _other(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str) and value[-1:].isalnum():
        return value[:-1] + ("1" if value[-1] != "1" else "2")
    return "x" if value is None else f"{value}x"
