"""What is left to do to bring a folder to another place, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiter_prep.errors import OutputNotEmpty
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.folder import SHARD_NAME
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

COMMIT_FILES, COMMIT_BYTES = 20, 50_000_000_000  # of one commit, unless one file is larger


@dataclass(frozen=True, slots=True)
class Change:
    """What is done at a time.

    Attributes:
        what: In words.
        add: Files to write.
        delete: Files to delete.
    """

    what: str
    add: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """What is left to do.

    Attributes:
        add: Files that are not there yet, or with other bytes.
        delete: Files that are there and do not belong to the folder.
        replaces: Whether another manifest is there, which goes first.
        sizes: Bytes of the files to add.
    """

    add: tuple[str, ...]
    delete: tuple[str, ...]
    replaces: bool
    sizes: Mapping[str, int]

    def changes(self) -> Iterator[Change]:
        """Yield what to do, in order: another's manifest goes first, ours comes last."""
        shards = [name for name in self.add if SHARD_NAME.fullmatch(name)]
        others = tuple(n for n in self.add if not SHARD_NAME.fullmatch(n) and n != MANIFEST_FILE)
        if self.replaces and (shards or others or self.delete):
            yield Change("Take away the manifest of another conversion", delete=(MANIFEST_FILE,))
        for names in self._batches(shards):
            yield Change("Add shards", add=names)
        if others or self.delete:
            yield Change("Add small files", add=others, delete=self.delete)
        if MANIFEST_FILE in self.add:
            yield Change("Add the manifest", add=(MANIFEST_FILE,))

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        batch: list[str] = []
        filled = 0
        for name in names:
            if batch and (len(batch) == COMMIT_FILES or filled + self.sizes[name] > COMMIT_BYTES):
                yield tuple(batch)
                batch, filled = [], 0
            batch.append(name)
            filled += self.sizes[name]
        if batch:
            yield tuple(batch)


def task_of(
    sizes: Mapping[str, int],
    there: Collection[str],
    is_there: Callable[[str], bool],
    where: str,
    *,
    removable: Collection[str] = (),
    overwrite: bool,
) -> Task:
    """Compare a folder with the place that it is to be brought to.

    Args:
        sizes: The files of the folder, and their bytes.
        there: Names that are there.
        is_there: Whether a file of the folder is there with the same bytes.
        where: What to call the place.
        removable: Names that are there and nobody's.
        overwrite: Whether what is there may be replaced.

    Raises:
        OutputNotEmpty: Something else is there, and may not be replaced.
    """
    add = tuple(name for name in sizes if not is_there(name))
    delete = tuple(sorted(set(there) - sizes.keys()))
    replaces = MANIFEST_FILE in there and MANIFEST_FILE in add
    foreign = [n for n in delete if not SHARD_NAME.fullmatch(n) and n not in removable]
    if replaces and not overwrite:
        raise OutputNotEmpty(
            f"{where} holds another conversion", "choose another place, or add --overwrite"
        )
    if foreign and not overwrite:
        raise OutputNotEmpty(
            f"{where} holds `{printable(foreign[0])}`, which is not of this folder "
            f"({len(foreign)} such)",
            "choose another place, or remove it with --overwrite",
        )
    return Task(add, delete, replaces, {name: sizes[name] for name in add})
