"""A checkpoint: the source folder, known by its headers alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import BadSource, NoRule
from aiter_prep.storage import jsontext
from aiter_prep.storage.collector import collector_paused
from aiter_prep.storage.files import COPY_HINT, LEADS_OUT, leaves_folder, read_whole
from aiter_prep.storage.header import Header, TensorInfo, read_header
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiter_prep.storage.supply import RemoteShards

CONFIG_FILE = "config.json"
MANIFEST_FILE = "aiter_prep.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HF_QUANT_CONFIG_FILE = "hf_quant_config.json"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
METHOD = "aiter_prep"
MAX_JSON_BYTES = 256 * 1024 * 1024
MAX_FILE_NAME_BYTES = 255
MAX_SHOWN = 5
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A source folder whose headers were read and checked.

    Attributes:
        folder: Where it lies.
        name: What to call it: the folder's name or the Hub id.
        revision: The Hub commit, or None for a local folder.
        config: `config.json`.
        hf_quant_config: `hf_quant_config.json` of modelopt, or None.
        headers: One per shard that the index names, sorted by file name.
        tensors: Every tensor that the index names, by name.
        unindexed: Tensors in those shards which the index does not name.
        stray_files: safetensors files beside the shards which the index does not name.
        remote: The shards, where they lie elsewhere.
    """

    folder: Path
    name: str
    revision: str | None
    config: Mapping[str, Any]
    hf_quant_config: Mapping[str, Any] | None
    headers: tuple[Header, ...]
    tensors: Mapping[str, TensorInfo]
    unindexed: tuple[TensorInfo, ...] = ()
    stray_files: tuple[str, ...] = field(default=())
    remote: RemoteShards | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors that the index names."""
        return sum(tensor.total_bytes for tensor in self.tensors.values())

    @property
    def architecture(self) -> str:
        """The first of `architectures` in the config, or `unknown`."""
        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else "unknown"

    @property
    def model_type(self) -> str:
        """`model_type` of the config, or `unknown`."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else "unknown"


def open_checkpoint(
    folder: str | Path, *, name: str | None = None, revision: str | None = None
) -> Checkpoint:
    """Open a Hugging Face checkpoint: `config.json` and safetensors shards.

    Only headers are read. The index decides which tensors count; it and the shards on disk are
    compared in both directions.

    Args:
        folder: A folder with `config.json` and either `model.safetensors` or an index.
        name: What to call it; the folder's own name by default.
        revision: The Hub commit that the folder holds.

    Raises:
        BadSource: Something is missing, truncated or contradicts itself.
        NoRule: The folder is prepared already, or a dtype is not known.
    """
    folder = Path(folder)
    try:
        return _open(folder, name, revision)
    except OSError as fault:
        raise BadSource(f"cannot read `{printable(str(folder))}`: {fault.strerror}") from None


def open_by_headers(
    headers: Sequence[Header], remote: RemoteShards, *, name: str, revision: str | None
) -> Checkpoint:
    """Open a checkpoint whose shards lie elsewhere.

    Args:
        headers: Of every shard.
        remote: The shards; all the other files lie in its folder.
        name: What to call it.
        revision: The Hub commit.

    Raises:
        BadSource: Something is missing or contradicts itself.
        NoRule: It is prepared already.
    """
    ordered = tuple(sorted(headers, key=lambda header: header.file))
    config = _read_config(remote.folder)
    indexes = sorted(remote.folder.glob("*.safetensors.index.json"))
    weight_map = _weight_map(indexes[0]) if indexes else None
    return _checked(remote.folder, name, revision, config, weight_map, ordered, remote)


@collector_paused()
def _open(folder: Path, name: str | None, revision: str | None) -> Checkpoint:
    _refuse_prepared_folder(folder)
    config = _read_config(folder)
    weight_map, files = _read_index(folder)
    for file in files:
        refuse_link_outside(folder / file)
    headers = tuple(read_header(folder / file) for file in files)
    return _checked(folder, name, revision, config, weight_map, headers, None)


def _checked(
    folder: Path,
    name: str | None,
    revision: str | None,
    config: Mapping[str, Any],
    weight_map: Mapping[str, str] | None,
    headers: tuple[Header, ...],
    remote: RemoteShards | None,
) -> Checkpoint:
    for header in headers:
        _refuse_shuffled_shard(header)
    tensors, unindexed = _match(weight_map, headers)
    if not tensors:
        raise BadSource(f"`{printable(folder.name)}` holds no tensor")
    known = {header.file for header in headers}
    stray = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in known)
    return Checkpoint(
        folder=folder,
        name=name or folder.resolve().name,
        revision=revision,
        config=config,
        hf_quant_config=read_optional_json(folder / HF_QUANT_CONFIG_FILE),
        headers=headers,
        tensors=tensors,
        unindexed=unindexed,
        stray_files=() if remote else tuple(stray),
        remote=remote,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a folder, as Python writes it: with NaN and infinity, if any.

    Raises:
        BadSource: It is missing, too large, or no JSON object.
    """
    return read_json_file(folder / CONFIG_FILE, allow_nan=True)


def read_json_file(path: Path, *, allow_nan: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file of at most `MAX_JSON_BYTES`.

    Raises:
        BadSource: It is missing, too large, or no JSON object.
    """
    name = printable(path.name)
    try:
        if not path.is_file():
            raise BadSource(f"`{name}` is missing in `{printable(str(path.parent))}`")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BadSource(f"`{name}` is larger than {MAX_JSON_BYTES} bytes")
        refuse_link_outside(path)
        text = read_whole(path, MAX_JSON_BYTES)
        return jsontext.parse_object(text, f"`{name}`", allow_nan=allow_nan)
    except OSError as fault:
        raise BadSource(f"cannot read `{name}`: {fault.strerror}") from None


def refuse_link_outside(path: Path) -> None:
    """Check that a file of a source lies in its folder.

    Raises:
        BadSource: It is a link to somewhere else.
    """
    if leaves_folder(path):
        raise BadSource(f"`{printable(path.name)}` {LEADS_OUT}", COPY_HINT)


def read_optional_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file, or return None where there is no file.

    Raises:
        BadSource: It is too large, or no JSON object.
    """
    return read_json_file(path) if path.exists() else None


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise BadSource(
            f"`{printable(str(folder))}` {what}",
            "give a folder with config.json and safetensors shards, or a Hub id org/name",
        )
    config = read_config(folder)
    for holder in (config, config.get("text_config")):
        if not isinstance(holder, dict):
            continue
        for key in QUANTIZATION_KEYS:
            quantization = holder.get(key)
            if quantization is not None and not isinstance(quantization, dict):
                raise BadSource(
                    f"`{key}` of `{CONFIG_FILE}` is {jsontext.shown(quantization)}, not an object",
                    "mend it, or remove it from a model that is not quantised",
                )
            if quantization is not None and quantization.get("quant_method") == METHOD:
                raise prepared_already(folder.name, is_whole=(folder / MANIFEST_FILE).exists())
    return config


def _refuse_prepared_folder(folder: Path) -> None:
    if (folder / MANIFEST_FILE).exists():
        raise prepared_already(folder.name)


def prepared_already(name: str, *, is_whole: bool = True) -> NoRule:
    """Return the refusal of a source that is a prepared folder.

    Args:
        name: What it is called.
        is_whole: Whether its manifest is there, without which nothing leads back.
    """
    way_out = "convert the original checkpoint"
    if is_whole:
        way_out += ", or undo this one with `aiter-prep restore`"
    else:
        way_out += f" again, or copy this folder again: its `{MANIFEST_FILE}` is gone"
    return NoRule(
        f"`{printable(name)}` is prepared already; preparing twice would shuffle twice", way_out
    )


def _refuse_shuffled_shard(header: Header) -> None:
    if METHOD in header.metadata or header.metadata.get("is_shuffled") == "true":
        raise NoRule(
            f"shard `{printable(header.file)}` says that its tensors are shuffled already",
            "convert the original checkpoint",
        )


def _read_index(folder: Path) -> tuple[Mapping[str, str] | None, list[str]]:
    """Return the weight_map (None for a single file) and the sorted names of the shards."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if (folder / INDEX_FILE) in indexes:
        indexes = [folder / INDEX_FILE]
    if len(indexes) > 1:
        names = ", ".join(f"`{printable(path.name)}`" for path in indexes)
        raise BadSource(f"more than one index: {names}", f"keep `{INDEX_FILE}` alone")
    if indexes:
        weight_map = _weight_map(indexes[0])
        files = sorted(set(weight_map.values()))
        _check_files(folder, files, indexes[0].name)
        return weight_map, files
    return None, [_single_shard(folder)]


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json_file(path)
    weight_map = index.get("weight_map")
    what = f"`{printable(path.name)}`"
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadSource(f"{what} has no `weight_map`")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_shard_name(file):
            raise BadSource(
                f"{what} places `{printable(name)}` in {jsontext.shown(file)}, which is not the "
                "plain name of a safetensors file in the same folder"
            )
    return weight_map


def is_plain_name(file: str) -> bool:
    """Return whether a text is the name of a file in a folder: no path, and safe on a terminal."""
    return (
        file.isprintable()
        and 0 < len(file.encode()) <= MAX_FILE_NAME_BYTES
        and not file.startswith(".")
        and not set(file) & {"/", "\\", "\0"}
    )


@lru_cache(maxsize=1024)  # an index names few files, but each for thousands of tensors
def _is_shard_name(file: str) -> bool:
    return file.endswith(".safetensors") and is_plain_name(file)


def _check_files(folder: Path, files: Iterable[str], index: str) -> None:
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        shown = ", ".join(f"`{printable(file)}`" for file in missing[:MAX_SHOWN])
        more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        raise BadSource(
            f"{shown}{more}: named by `{printable(index)}`, but missing in the folder",
            "finish the download",
        )


def _single_shard(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE_FILE in found and not any("-of-" in name for name in found):
        return SINGLE_FILE
    if len(found) == 1 and "-of-" not in found[0]:
        return found[0]
    if found:
        raise BadSource(
            f"{len(found)} safetensors files in `{printable(folder.name)}`, but no `{INDEX_FILE}`",
            "finish the download: without the index nothing says which shards belong together",
        )
    if any(next(folder.glob(pattern), None) for pattern in PICKLES):
        raise BadSource(
            f"`{printable(folder.name)}` holds pickled weights only, which can run code when read",
            "convert them to safetensors first, for example with transformers' save_pretrained",
        )
    raise BadSource(f"`{printable(folder.name)}` holds no safetensors file")


def _match(
    weight_map: Mapping[str, str] | None, headers: Iterable[Header]
) -> tuple[dict[str, TensorInfo], tuple[TensorInfo, ...]]:
    """Return the tensors that count, by name, and those that the index does not name."""
    found: dict[str, TensorInfo] = {}
    unindexed: list[TensorInfo] = []
    for header in headers:
        for tensor in header.tensors:
            if weight_map is not None and weight_map.get(tensor.name) != tensor.file:
                unindexed.append(tensor)
            else:
                found[tensor.name] = tensor
    for tensor in unindexed:
        if tensor.name in found:
            raise BadSource(
                f"tensor `{printable(tensor.name)}` stands in two shards, "
                f"`{printable(found[tensor.name].file)}` and `{printable(tensor.file)}`",
                "remove the one that is wrong",
            )
    lost = [name for name in weight_map or () if name not in found]
    if lost:
        file = (weight_map or {})[lost[0]]
        raise BadSource(
            f"tensor `{printable(lost[0])}` is not in `{printable(file)}`, where the index places "
            f"it ({len(lost)} such)",
            "the index and the shards are not of the same checkpoint",
        )
    return found, tuple(unindexed)
