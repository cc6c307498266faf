"""What `verify` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiter_prep.errors import AiterPrepError
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.side_files import check_side_file, write_side_file


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as the manifest says.

    Attributes:
        file: The file.
        tensor: The tensor, where it can be told.
        rank: Its rank, where it has one.
        what: What is wrong.
    """

    file: str
    tensor: str | None
    rank: int | None
    what: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found.

    Attributes:
        folder: The prepared folder.
        problems: What is wrong; empty if nothing is.
        shards: Shards that were checked.
        tensors: Tensors that were checked.
        total_bytes: Bytes that were read.
        lossy_tensors: Tensors that cannot be undone; with a source, they were computed again
            from it and compared.
        notes: What a person should know, though it is not wrong.
        sha256: SHA-256 of every file of the folder, by name, in hexadecimal digits; empty unless
            it was asked for and nothing is wrong.
    """

    folder: Path
    problems: tuple[Problem, ...]
    shards: int
    tensors: int
    total_bytes: int
    lossy_tensors: int = 0
    notes: tuple[str, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def write_sha256sums(self, path: str | Path) -> None:
        """Write a list that `sha256sum --check` takes, run in the folder.

        Raises:
            InvalidUsage: The list would lie in the folder, which then had a file too many.
            AiterPrepError: It cannot be written, or there is none: see `sha256`.
        """
        path = Path(path)
        check_side_file(path, [self.folder])
        if not self.sha256:
            raise AiterPrepError(
                f"`{printable(str(self.folder))}` has no SHA-256 sums to write",
                "ask `verify` for them; a damaged folder has none",
            )
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(self.sha256.items()))
        write_side_file(path, lines.encode())
