"""Feeds what somebody else wrote to every reader; all but our own refusals is a find."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from aiter_prep.errors import AiterPrepError, BadSource, DataMismatch, NoRule
from aiter_prep.families.classify import classify, contradictions
from aiter_prep.families.promises import promised_scheme
from aiter_prep.manifest import parse_manifest
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.storage.header import read_header
from aiter_prep.storage.jsontext import parse
from prepared import sealed

Target = Callable[[bytes], None]

# in memory where there is such a folder: a million small files are no work for a disk
_HOME = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - only for speed
_FOLDER = tempfile.TemporaryDirectory(prefix="aiter-prep-fuzz-", dir=_HOME)
FOLDER = Path(_FOLDER.name)
SHARD = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _said(fault: AiterPrepError) -> None:
    """Check that a refusal can be shown."""
    assert (fault.message + fault.hint).isprintable(), fault.message
    assert len(fault.message) < 2000, fault.message


def fuzz_header(data: bytes) -> None:
    """Read bytes as a whole shard."""
    path = FOLDER / SHARD
    path.write_bytes(data)
    try:
        header = read_header(path)
    except (BadSource, NoRule) as fault:
        _said(fault)
    else:
        assert sum(tensor.total_bytes for tensor in header.tensors) <= len(data)
        assert all(tensor.start + tensor.total_bytes <= len(data) for tensor in header.tensors)


def fuzz_header_text(data: bytes) -> None:
    """Read bytes as the JSON of a header, before 64 bytes of data."""
    fuzz_header(struct.pack("<Q", len(data)) + data + bytes(64))


def fuzz_index(data: bytes) -> None:
    """Open a checkpoint with this index."""
    folder = FOLDER / "index"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "a.safetensors").write_bytes(_SMALL_SHARD)
    (folder / INDEX).write_bytes(data)
    with _ours_only():
        open_checkpoint(folder)


def fuzz_config(data: bytes) -> None:
    """Open and sort a checkpoint with this config, and read its promises."""
    folder = FOLDER / "config"
    if not folder.exists():
        folder.mkdir()
        (folder / SHARD).write_bytes(_MOE_SHARD)
    (folder / "config.json").write_bytes(data)
    with _ours_only():
        checkpoint = open_checkpoint(folder)
        contradictions(checkpoint, classify(checkpoint).blocks)
    with suppress(BadSource):
        config = parse(data, "it")
        if isinstance(config, dict):
            promised_scheme(config, config, "model.layers.0.mlp.experts")


def fuzz_manifest(data: bytes) -> None:
    """Parse a manifest, as it is and with a digest that fits."""
    _manifest(data)
    with suppress(BadSource, ValueError, RecursionError):
        document = parse(data, "it")
        if isinstance(document, dict):
            _manifest(sealed(document))


def _manifest(data: bytes) -> None:
    try:
        parse_manifest(data)
    except DataMismatch as fault:
        _said(fault)


class _ours_only:  # noqa: N801 - used as a statement
    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, fault: BaseException | None, _trace: object) -> bool:
        if isinstance(fault, (BadSource, NoRule)):
            _said(fault)
            return True
        return False


TARGETS: dict[str, Target] = {
    "header": fuzz_header,
    "header_text": fuzz_header_text,
    "index": fuzz_index,
    "config": fuzz_config,
    "manifest": fuzz_manifest,
}

# --- honest inputs, from which lies are made ----------------------------------------------------


def _shard(tensors: Iterable[tuple[str, str, list[int], int]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


_EXPERT = "model.layers.0.mlp.experts.0"
_SMALL_SHARD = _shard([("a", "U8", [4], 4)])
_MOE_SHARD = _shard(
    [
        *((f"{_EXPERT}.{p}.weight", "BF16", [32, 32], 2048) for p in ("gate_proj", "up_proj")),
        (f"{_EXPERT}.down_proj.weight", "BF16", [32, 32], 2048),
        ("model.norm.weight", "BF16", [32], 64),
    ]
)
_QUANTIZATION: list[dict[str, Any]] = [
    {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["re:.*gate$"]},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "*.gate"]},
    {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": {
                "dtype": "fp4",
                "qscheme": "per_group",
                "group_size": 32,
                "scale_format": "e8m0",
            }
        },
        "layer_quant_config": {"*.experts.*": {"weight": {"dtype": "int8"}}},
        "export": {"weight_format": "real_quantized"},
        "exclude": ["re:model.layers.(0|1).mlp", "lm_head"],
    },
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear", r"re:.*\.experts\.\d+\..*"],
                "weights": {"type": "float", "num_bits": 8, "strategy": "block"},
            }
        },
        "ignore": ["lm_head", r"re:.*mlp.gate$"],
    },
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}},
]


def seeds(target: str, manifests: Iterable[bytes] = ()) -> list[bytes]:
    """Return honest inputs of a target."""
    if target == "header":
        return [_SMALL_SHARD, _MOE_SHARD]
    if target == "header_text":
        entry = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
        return [json.dumps({"__metadata__": {"format": "pt"}, "model.norm.weight": entry}).encode()]
    if target == "index":
        index = {"metadata": {"total_size": 4}, "weight_map": {"a": "a.safetensors"}}
        return [json.dumps(index).encode()]
    if target == "manifest":
        return list(manifests)
    config = {"architectures": ["A"], "model_type": "qwen3_moe", "num_experts": 1}
    return [json.dumps({**config, "quantization_config": q}).encode() for q in _QUANTIZATION]


# --- lies, without coverage ---------------------------------------------------------------------

_WORDS: list[Any] = [
    *(0, -1, 1, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, True, False, None, 0.5, 1e308),
    *("", "re:(a+)+$", "re:[", "*" * 30, "{expert}", "../x", "/etc/passwd", "\0", "\x1b[2J"),
    *("\ud800", "\u202e", "n" * 2000, [], {}, [[]], [[[[]]]], {"a": {}}, "U8", "F4", "BF16"),
]
_TOKENS = [
    *(b"1e999", b"NaN", b"-0", b"9" * 40, b"9" * 4301, b"[" * 200, b'{"a":' * 200, b"]", b"}"),
    *(b'"a":1,"a":1', b"\\ud800", b"\xff", b"\0", b"\xef\xbb\xbf", b'"__metadata__"', b","),
]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return an input that lies in a few places: in its values, or in its bytes."""
    if rng.random() < 0.6:
        lied = _with_other_values(data, rng)
        if lied is not None:
            return lied
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(raw) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at:at] = rng.choice(_TOKENS)
        elif kind == 2:
            del raw[at : at + rng.choice((1, 2, 8, 64))]
        elif kind == 3:
            raw[at : at + 1] = rng.randbytes(rng.choice((1, 8)))
        else:
            start = rng.randrange(len(raw) + 1)
            raw[at:at] = raw[start : start + rng.choice((1, 8, 64))]
    return bytes(raw)


def _with_other_values(data: bytes, rng: random.Random) -> bytes | None:
    begin = 8 if data[:1] != b"{" else 0
    end = data.rfind(b"}") + 1
    try:
        document = json.loads(data[begin:end])
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change(document, rng)
    text = json.dumps(document).encode()
    return (struct.pack("<Q", len(text)) if begin else b"") + text + data[end:]


def _change(document: Any, rng: random.Random) -> None:
    """Walk down at random and put another value, key or item somewhere."""
    place = document
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys or rng.random() < 0.1:
            word = copy.deepcopy(rng.choice(_WORDS))
            if isinstance(place, dict):
                place[str(rng.choice(_WORDS))[:2000]] = word
            else:
                place.append(word)
            return
        key = rng.choice(keys)
        if not isinstance(place[key], (dict, list)) or rng.random() < 0.15:
            if rng.random() < 0.2:
                del place[key]
            elif rng.random() < 0.3:
                place[key] = copy.deepcopy(place[rng.choice(keys)])
            else:
                place[key] = copy.deepcopy(rng.choice(_WORDS))
            return
        place = place[key]


# --- lies, by hypothesis ------------------------------------------------------------------------


def documents(target: str, manifests: Iterable[bytes] = ()) -> st.SearchStrategy[bytes]:
    """Return JSON made of the keys and values of honest inputs, in any order and nesting."""
    keys: set[str] = set()
    values: list[Any] = [word for word in _WORDS if not isinstance(word, (dict, list))]
    for data in seeds(target, manifests):
        _collect(json.loads(data[8:].rstrip(b"\0") if target == "header" else data), keys, values)
    leaves = st.sampled_from(values) | st.integers() | st.floats() | st.text(max_size=20)
    names = st.sampled_from(sorted(keys)) | st.text(max_size=12)
    tree = st.recursive(
        leaves,
        lambda item: st.lists(item, max_size=3) | st.dictionaries(names, item, max_size=5),
        max_leaves=12,
    )
    texts = st.dictionaries(names, tree, max_size=5).map(json.dumps)
    if target == "header":
        return st.builds(_as_shard, texts, st.integers(-3, 3), st.integers(0, 64))
    return texts.map(str.encode)


def _as_shard(text: str, off: int, size: int) -> bytes:
    return struct.pack("<Q", max(0, len(text) + off)) + text.encode() + bytes(size)


def _collect(document: Any, keys: set[str], values: list[Any]) -> None:
    if isinstance(document, dict):
        keys.update(document)
        for item in document.values():
            _collect(item, keys, values)
    elif isinstance(document, list):
        for item in document:
            _collect(item, keys, values)
    else:
        values.append(document)
