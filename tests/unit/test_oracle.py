"""Hold the oracle to AITER's own bytes, and to the slicing and naming rules of the documents."""

from __future__ import annotations

import itertools
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from oracle import (  # noqa: E402
    WIDTH,
    Bytes,
    Source,
    e8m0_offsets,
    expected,
    padded_sizes,
    rank_columns,
    read_safetensors,
    shuffle_e8m0,
    tile_16x16,
    tile_offsets,
)

GOLDEN = TESTS / "golden"
PAIRS = [p["name"] for p in json.loads((GOLDEN / "aiter_layouts.json").read_text("utf-8"))]
TILED = [name for name in PAIRS if name.startswith("weight_16x16_")]
E8M0 = [name for name in PAIRS if name.startswith("scale_e8m0_")]


@pytest.fixture(scope="module")
def golden() -> dict[str, Source]:
    """Read all golden tensors once."""
    return read_safetensors(GOLDEN / "aiter_layouts.safetensors")


def table(source: Source) -> Bytes:
    """View a U8 tensor in its own shape."""
    return np.frombuffer(source.data, dtype=np.uint8).reshape(source.shape)


def random_source(dtype: str, shape: tuple[int, ...], seed: int) -> Source:
    """Make a tensor of random bytes that hold no 0x7F, 0x80 or 0xFF."""
    size = int(np.prod(shape)) * WIDTH[dtype]
    data = np.random.default_rng(seed).integers(0, 0x7F, size, dtype=np.uint8)
    return Source(dtype, shape, data.tobytes())


def write_file(path: Path, tensors: dict[str, Source]) -> None:
    """Write a plain safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, t in tensors.items():
        offsets = [at, at + len(t.data)]
        header[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": offsets}
        at += len(t.data)
    raw = json.dumps(header).encode()
    body = b"".join(t.data for t in tensors.values())
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def experts_of(
    weight: str, inter: int, hidden: int, pack: int = 1, experts: int = 2
) -> dict[str, Source]:
    """Make per-expert weights `m.experts.E.*.weight`; `pack` elements share a stored one."""
    out = {}
    for e in range(experts):
        sizes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden)}
        sizes["down_proj"] = (hidden, inter)
        for i, (projection, (n, k)) in enumerate(sizes.items()):
            name = f"m.experts.{e}.{projection}.weight"
            out[name] = random_source(weight, (n, k // pack), 10 * e + i)
    return out


def with_scales(
    tensors: dict[str, Source], dtype: str, rows: int, elements: int, suffix: str
) -> dict[str, Source]:
    """Add a scale per `rows` x `elements` stored elements to every weight."""
    out = dict(tensors)
    for seed, (name, t) in enumerate(tensors.items()):
        shape = (t.shape[0] // rows, t.shape[1] // elements)
        out[name.replace(".weight", f".{suffix}")] = random_source(dtype, shape, 100 + seed)
    return out


def tiled_byte(data: bytes, expert: int, row: int, byte: int, rows: int, row_bytes: int) -> int:
    """Look one byte of a tiled `[E, rows, row_bytes]` tensor up."""
    tile = (row // 16) * (row_bytes // 16) + byte // 16
    return data[expert * rows * row_bytes + tile * 256 + (row % 16) * 16 + byte % 16]


@pytest.mark.parametrize("name", TILED)
def test_tiling_gives_the_bytes_of_shuffle_weight(golden: dict[str, Source], name: str) -> None:
    """AITER's `shuffle_weight(x, (16, 16))` and the offset formula agree."""
    result = tile_16x16(table(golden[f"{name}/in"]))
    assert result.shape == golden[f"{name}/out"].shape
    assert result.tobytes() == golden[f"{name}/out"].data


@pytest.mark.parametrize("name", E8M0)
def test_scale_shuffle_gives_the_bytes_of_e8m0_shuffle(
    golden: dict[str, Source], name: str
) -> None:
    """AITER's `e8m0_shuffle(x)` agrees at defined bytes; every pad byte is 0x00."""
    result = shuffle_e8m0(table(golden[f"{name}/in"]))
    wanted = table(golden[f"{name}/out"])
    assert result.shape == wanted.shape
    valid = golden.get(f"{name}/valid")
    defined = np.ones(wanted.shape, dtype=np.bool_) if valid is None else table(valid) == 1
    assert int(defined.sum()) == table(golden[f"{name}/in"]).size
    assert np.array_equal(result[defined], wanted[defined])
    assert not result[~defined].any()


def test_the_golden_file_has_pairs_of_both_layouts() -> None:
    """An empty parametrisation would pass without a comparison."""
    assert len(TILED) == 11
    assert len(E8M0) == 10


def test_both_offset_formulas_are_permutations() -> None:
    """No byte is lost or written twice."""
    for offsets in (tile_offsets(48, 96), e8m0_offsets(256, 24)):
        assert sorted(offsets.tolist()) == list(range(offsets.size))


@pytest.mark.parametrize(("rows", "row_bytes"), [(24, 64), (32, 48)])
def test_a_shape_that_has_no_whole_tiles_is_refused(rows: int, row_bytes: int) -> None:
    """Rows come in 16, bytes of a row in 32."""
    with pytest.raises(ValueError, match="cannot be tiled"):
        tile_16x16(np.zeros((rows, row_bytes), dtype=np.uint8))


@pytest.mark.parametrize(
    ("tp", "shares"),
    [(1, [2880]), (4, [736, 736, 736, 672]), (8, [384] * 7 + [192]), (16, [192] * 15 + [0])],
)
def test_gpt_oss_ranks_take_whole_blocks_and_the_last_what_is_left(
    tp: int, shares: list[int]
) -> None:
    """The published sizes of gpt-oss, for which 2880 / tp is no multiple of 32."""
    columns = rank_columns(2880, tp, gpt_oss=True)
    assert [stop - start for start, stop in columns] == shares
    assert columns[0][0] == 0
    assert columns[-1][1] == 2880
    assert all(a[1] == b[0] for a, b in itertools.pairwise(columns))


def test_other_ranks_take_equal_shares_of_the_size_in_the_checkpoint() -> None:
    """The stride is the checkpoint's, not the padded one."""
    assert rank_columns(320, 4) == [(0, 80), (80, 160), (160, 240), (240, 320)]
    with pytest.raises(ValueError, match="does not divide"):
        rank_columns(320, 3)


@pytest.mark.parametrize(
    ("share", "padded"),
    [(16, 64), (64, 64), (80, 128), (160, 192), (192, 192), (193, 256), (320, 384), (384, 384)],
)
def test_bf16_aligns_to_64_up_to_192_and_to_128_above(share: int, padded: int) -> None:
    """The rule counts one rank's share; the hidden size stays as it is."""
    assert padded_sizes("plain", share, 160) == (padded, 160)


def test_mxfp4_aligns_both_sizes_to_256_and_fp8_none() -> None:
    """The other rows of the target's table."""
    assert padded_sizes("mxfp4", 96, 288) == (256, 512)
    assert padded_sizes("mxfp8", 96, 288) == (96, 288)
    assert padded_sizes("channel", 48, 80) == (48, 80)
    with pytest.raises(ValueError, match="multiple of 128"):
        padded_sizes("block", 192, 256)


def test_gate_rows_start_at_zero_and_up_rows_at_the_padded_size(tmp_path: Path) -> None:
    """bf16, I 160 at tp 2: each rank has 80 rows in a half of 128."""
    source = experts_of("BF16", 160, 64)
    write_file(tmp_path / "model.safetensors", source)
    result = expected(tmp_path, 2)
    assert len(result) == 4
    w13, w2 = result[1, "m.experts.w13_weight"], result[1, "m.experts.w2_weight"]
    assert (w13.dtype, w13.runtime_dtype, w13.shape) == ("BF16", "bfloat16", (2, 256, 64))
    assert w2.shape == (2, 64, 128)
    for e, row, byte in [(0, 0, 0), (0, 79, 127), (1, 17, 33)]:
        for projection, base in (("gate_proj", 0), ("up_proj", 128)):
            wanted = source[f"m.experts.{e}.{projection}.weight"].rows()[80 + row, byte]
            assert tiled_byte(w13.data, e, base + row, byte, 256, 128) == wanted
    for e, row, byte in [(0, 0, 0), (1, 63, 159), (1, 16, 31)]:
        wanted = source[f"m.experts.{e}.down_proj.weight"].rows()[row, 160 + byte]
        assert tiled_byte(w2.data, e, row, byte, 64, 256) == wanted
    assert all(tiled_byte(w13.data, 0, row, 5, 256, 128) == 0 for row in range(80, 128))
    assert all(tiled_byte(w2.data, 0, 3, byte, 64, 256) == 0 for byte in range(160, 256))


def test_block_scales_are_cut_like_the_weight_and_keep_their_dtype(tmp_path: Path) -> None:
    """FP8 with one scale for 128 x 128 elements."""
    source = with_scales(experts_of("F8_E4M3", 512, 256), "BF16", 128, 128, "weight_scale_inv")
    write_file(tmp_path / "model.safetensors", source)
    result = expected(tmp_path, 2)
    s13 = result[1, "m.experts.w13_weight_scale_inv"]
    s2 = result[1, "m.experts.w2_weight_scale_inv"]
    assert (s13.dtype, s13.runtime_dtype, s13.shape) == ("BF16", "bfloat16", (2, 4, 2))
    assert s2.shape == (2, 2, 2)
    parts = [source[f"m.experts.1.{p}.weight_scale_inv"].data for p in ("gate_proj", "up_proj")]
    assert s13.data[16:] == parts[0][8:] + parts[1][8:]
    down = source["m.experts.1.down_proj.weight_scale_inv"].data
    assert s2.data[8:] == down[4:8] + down[12:16]


@pytest.mark.parametrize("flat", [True, False], ids=["vector", "column"])
def test_channel_scales_of_w2_are_whole_on_every_rank(tmp_path: Path, flat: bool) -> None:
    """Quark writes `[N]`, compressed-tensors `[N, 1]`; both become `[E, N, 1]`."""
    source = experts_of("F8_E4M3", 64, 32)
    for name, t in list(source.items()):
        shape = t.shape[:1] if flat else (t.shape[0], 1)
        source[f"{name}_scale"] = random_source("F32", shape, 7)
    write_file(tmp_path / "model.safetensors", source)
    result = expected(tmp_path, 2)
    s13, s2 = (result[1, f"m.experts.{w}_weight_scale"] for w in ("w13", "w2"))
    assert (s13.dtype, s13.shape, s2.shape) == ("F32", (2, 64, 1), (2, 32, 1))
    gate, up = (source[f"m.experts.0.{p}_proj.weight_scale"].data for p in ("gate", "up"))
    assert s13.data[:256] == gate[128:] + up[128:]
    assert s2.data[:128] == source["m.experts.0.down_proj.weight_scale"].data


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        ("F32", struct.pack("<f", 0.375), struct.pack("<f", 0.75)),
        ("BF16", b"\xc1\x3e", b"\x41\x3f"),
    ],
)
def test_gfx942_turns_negative_zero_into_zero_and_doubles_the_scales(
    tmp_path: Path, dtype: str, before: bytes, after: bytes
) -> None:
    """The byte 0x80 is NaN in e4m3fnuz, and its values count half."""
    source = {}
    for p in ("gate_proj", "up_proj", "down_proj"):
        name = f"m.experts.0.{p}.weight"
        source[name] = Source("F8_E4M3", (128, 128), b"\x80\x88\x38\x01" * 4096)
        source[f"{name}_scale_inv"] = Source(dtype, (1, 1), before)
    write_file(tmp_path / "model.safetensors", source)
    result = expected(tmp_path, 1, "gfx942")
    weight = result[0, "m.experts.w13_weight"]
    assert (weight.dtype, weight.runtime_dtype) == ("U8", "float8_e4m3fnuz")
    assert weight.data == b"\x00\x88\x38\x01" * 8192
    scale = result[0, "m.experts.w13_weight_scale_inv"]
    assert (scale.dtype, scale.data) == (dtype, after * 2)
    kept = expected(tmp_path, 1)[0, "m.experts.w13_weight"]
    assert (kept.dtype, kept.runtime_dtype) == ("F8_E4M3", "float8_e4m3fn")
    assert kept.data == b"\x80\x88\x38\x01" * 8192


def test_mxfp4_scales_are_padded_with_zero_and_folded_into_rows(tmp_path: Path) -> None:
    """I 96 and H 288 become 256 and 512: 8 and 16 scale columns."""
    source = with_scales(experts_of("U8", 96, 288, pack=2), "U8", 1, 16, "weight_scale")
    write_file(tmp_path / "model.safetensors", source)
    result = expected(tmp_path, 1)
    w13, w2 = result[0, "m.experts.w13_weight"], result[0, "m.experts.w2_weight"]
    assert (w13.dtype, w13.runtime_dtype) == ("U8", "float4_e2m1fn_x2")
    assert (w13.shape, w2.shape) == ((2, 512, 256), (2, 512, 128))
    s13, s2 = (result[0, f"m.experts.{w}_weight_scale"] for w in ("w13", "w2"))
    assert (s13.runtime_dtype, s13.shape, s2.shape) == ("float8_e8m0fnu", (1024, 16), (1024, 8))
    wanted = np.zeros((1024, 16), dtype=np.uint8)
    for e in range(2):
        for half, p in enumerate(("gate_proj", "up_proj")):
            first = e * 512 + half * 256
            wanted[first : first + 96, :9] = source[f"m.experts.{e}.{p}.weight_scale"].rows()
    assert s13.data == shuffle_e8m0(wanted).tobytes()


def test_the_spellings_of_mxfp4_give_the_same_bytes(tmp_path: Path) -> None:
    """Quark, compressed-tensors and DeepSeek-V4 differ in names and dtypes only."""
    quark = with_scales(experts_of("U8", 64, 64, pack=2), "U8", 1, 16, "weight_scale")
    packed, native = {}, {}
    projections = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, t in quark.items():
        packed[f"{name}_packed" if name.endswith(".weight") else name] = t
        path, projection, suffix = name.rsplit(".", 2)
        dtype, kind = ("I8", "weight") if suffix == "weight" else ("F8_E8M0", "scale")
        native[f"{path}.{projections[projection]}.{kind}"] = Source(dtype, t.shape, t.data)
    results = []
    for label, tensors in (("quark", quark), ("packed", packed), ("native", native)):
        (tmp_path / label).mkdir()
        write_file(tmp_path / label / "model.safetensors", tensors)
        results.append(expected(tmp_path / label, 2))
    assert results[0] == results[1] == results[2]
    assert (1, "m.experts.w13_weight_scale") in results[2]


def test_mxfp8_keeps_its_sizes_and_shuffles_its_scales(tmp_path: Path) -> None:
    """One e8m0 byte for 32 elements, nothing aligned, the `_inv` spelling kept."""
    source = with_scales(experts_of("F8_E4M3", 64, 96), "U8", 1, 32, "weight_scale_inv")
    write_file(tmp_path / "model.safetensors", source)
    result = expected(tmp_path, 2)
    assert result[1, "m.experts.w13_weight"].dtype == "F8_E4M3"
    assert result[1, "m.experts.w13_weight"].shape == (2, 64, 96)
    scale = result[1, "m.experts.w2_weight_scale_inv"]
    assert (scale.dtype, scale.shape) == ("U8", (256, 8))
    rows = [source[f"m.experts.{e}.down_proj.weight_scale_inv"].rows()[:, 1:] for e in range(2)]
    assert scale.data == shuffle_e8m0(np.concatenate(rows)).tobytes()


def test_gpt_oss_rows_are_separated_and_its_down_bias_is_on_rank_zero(tmp_path: Path) -> None:
    """I 96 at tp 2: rank 0 takes two blocks, rank 1 one; at tp 4 the last rank takes none."""
    inter, hidden, base = 96, 64, "m.experts"
    source = {
        f"{base}.gate_up_proj_blocks": random_source("U8", (2, 2 * inter, 2, 16), 1),
        f"{base}.gate_up_proj_scales": random_source("U8", (2, 2 * inter, 2), 2),
        f"{base}.gate_up_proj_bias": random_source("BF16", (2, 2 * inter), 3),
        f"{base}.down_proj_blocks": random_source("U8", (2, hidden, 3, 16), 4),
        f"{base}.down_proj_scales": random_source("U8", (2, hidden, 3), 5),
        f"{base}.down_proj_bias": random_source("BF16", (2, hidden), 6),
    }
    write_file(tmp_path / "model.safetensors", source)
    result = expected(tmp_path, 2)
    w13, w2 = result[1, f"{base}.w13_weight"], result[1, f"{base}.w2_weight"]
    assert (w13.shape, w2.shape) == ((2, 512, 128), (2, 256, 128))
    blocks = np.frombuffer(source[f"{base}.gate_up_proj_blocks"].data, np.uint8)
    for half, row, byte in [(0, 0, 0), (0, 31, 31), (1, 0, 7), (1, 31, 16)]:
        wanted = blocks[(192 + 2 * (64 + row) + half) * 32 + byte]
        assert tiled_byte(w13.data, 1, half * 256 + row, byte, 512, 128) == wanted
    down = np.frombuffer(source[f"{base}.down_proj_blocks"].data, np.uint8)
    assert tiled_byte(w2.data, 1, 63, 15, 256, 128) == down[(64 + 63) * 48 + 2 * 16 + 15]
    assert tiled_byte(w2.data, 1, 63, 16, 256, 128) == 0

    bias = result[1, f"{base}.w13_bias"]
    assert (bias.dtype, bias.runtime_dtype, bias.shape) == ("F32", "float32", (2, 512))
    raw = source[f"{base}.gate_up_proj_bias"].data
    for e, half, row in [(0, 0, 0), (1, 0, 31), (1, 1, 5)]:
        element = 2 * (e * 192 + 2 * (64 + row) + half)
        at = 4 * (e * 512 + half * 256 + row)
        assert bias.data[at : at + 4] == b"\x00\x00" + raw[element : element + 2]
    first, second = (result[r, f"{base}.w2_bias"] for r in range(2))
    assert first.shape == (2, 256)
    assert first.data[2:4] == source[f"{base}.down_proj_bias"].data[:2]
    assert not any(second.data)
    empty = [t for (rank, _), t in expected(tmp_path, 4).items() if rank == 3]
    assert len(empty) == 6
    assert not any(any(t.data) for t in empty)


def test_the_index_decides_and_a_layer_may_span_files(tmp_path: Path) -> None:
    """A tensor that is on disk but not in the index does not count."""
    source = experts_of("F16", 64, 64, experts=1)
    write_file(tmp_path / "a.safetensors", dict(list(source.items())[:1]))
    write_file(tmp_path / "b.safetensors", dict(list(source.items())[1:]))
    stale = {name: random_source("F16", (64, 64), 99) for name in source}
    write_file(tmp_path / "c.safetensors", stale)
    place = dict.fromkeys(source, "b.safetensors") | {next(iter(source)): "a.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": place}), encoding="utf-8")
    single = tmp_path / "single"
    single.mkdir()
    write_file(single / "model.safetensors", source)
    assert expected(tmp_path, 1) == expected(single, 1)
    assert expected(single, 1)[0, "m.experts.w2_weight"].runtime_dtype == "float16"


def test_only_routed_experts_are_prepared_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    """Shared experts and dense layers are left alone; an unknown expert tensor is no silent gap."""
    source = experts_of("BF16", 64, 64) | {"m.gate.weight": random_source("BF16", (2, 64), 0)}
    source["m.shared_experts.gate_proj.weight"] = random_source("BF16", (64, 64), 0)
    source |= {f"mtp.0.{k}": t for k, t in experts_of("BF16", 64, 64).items()}
    file = tmp_path / "model.safetensors"
    write_file(file, source)
    names = {
        f"{path}.{w}_weight" for path in ("m.experts", "mtp.0.m.experts") for w in ("w13", "w2")
    }
    assert set(expected(tmp_path, 1)) == {(0, name) for name in names}
    write_file(file, source | {"m.experts.0.up_proj.input_scale": random_source("F32", (1,), 0)})
    with pytest.raises(NotImplementedError, match="input_scale"):
        expected(tmp_path, 1)
