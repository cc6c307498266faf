from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import prepared
import tiny
from aiter_prep.errors import DataMismatch, InvalidUsage
from aiter_prep.manifest import read_manifest

torch = pytest.importorskip("torch")

from aiter_prep.engines.plain import attach, load  # noqa: E402  # needs torch

pytestmark = pytest.mark.torch

KINDS = ["bf16", "fp8_block_f32", "mxfp4_quark", "mxfp4_gpt_oss", "fp8_tensor"]


def folder_of(tmp_path: Path, kind: str = "bf16", tp: int = 2, **options: Any) -> Path:
    """Prepare a tiny checkpoint."""
    source = tiny.write(tmp_path / "source", kind=kind, hidden=256, intermediate=512)
    prepared.prepare(source, tmp_path / "out", tp, **options)
    return tmp_path / "out"


def raw(tensor: Any) -> bytes:
    """Return the bytes of a tensor."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def stored(folder: Path, rank: int | None) -> dict[str, bytes]:
    """Return the bytes of every tensor of a rank, read by the tests' own reader."""
    owner = "common" if rank is None else f"rank-{rank}"
    return {
        name: tensor.data
        for path in folder.glob(f"model-{owner}-part-*.safetensors")
        for name, tensor in tiny.read_shard(path).items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_loading_gives_the_bytes_that_are_stored(tmp_path: Path, kind: str, rank: int) -> None:
    folder = folder_of(tmp_path, kind, target="vllm" if kind == "fp8_tensor" else "aiter")
    loaded = load(folder, rank)
    assert {name: raw(tensor) for name, tensor in loaded.items()} == stored(folder, rank)


@pytest.mark.parametrize("gfx", ["gfx950", "gfx942"])
def test_tensors_have_dtype_shape_and_flags_of_the_manifest(tmp_path: Path, gfx: str) -> None:
    folder = folder_of(tmp_path, "fp8_block_f32", gfx=gfx)
    loaded = load(folder, 0)
    records = [record for record in read_manifest(folder).tensors if record.rank == 0]
    assert {record.runtime_dtype for record in records} >= {
        "float8_e4m3fnuz" if gfx == "gfx942" else "float8_e4m3fn"
    }
    for record in records:
        tensor = loaded[record.name]
        assert str(tensor.dtype) == f"torch.{record.runtime_dtype}"
        assert tuple(tensor.shape) == record.shape
        assert tensor.is_contiguous()
        assert hasattr(tensor, "is_shuffled") == record.name.endswith("_weight")
        assert tensor.aiter_prep_layout == record.layout


def test_packed_weights_and_their_scales_have_the_dtypes_of_kernels(tmp_path: Path) -> None:
    loaded = load(folder_of(tmp_path, "mxfp4_quark"), 0)
    dtypes = {name.rpartition(".")[2]: tensor.dtype for name, tensor in loaded.items()}
    assert dtypes["w13_weight"] == torch.float4_e2m1fn_x2
    assert dtypes["w13_weight_scale"] in {torch.uint8, torch.float8_e8m0fnu}


def test_aiter_flags_weights_and_no_scales(tmp_path: Path) -> None:
    loaded = load(folder_of(tmp_path, "mxfp4_quark"), 0)
    flagged = {name.rpartition(".")[2] for name, t in loaded.items() if hasattr(t, "is_shuffled")}
    assert flagged == {"w13_weight", "w2_weight"}


def test_common_tensors_come_on_request_and_have_no_flags(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    common = set(load(folder, 0, common=True)) - set(load(folder, 0))
    assert common == set(stored(folder, None))
    loaded = load(folder, 0, common=True)
    assert not any(hasattr(loaded[name], "is_shuffled") for name in common)
    assert not any(hasattr(loaded[name], "aiter_prep_layout") for name in common)


def test_every_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    loaded = load(folder_of(tmp_path), 0)
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == len(loaded)


def test_nothing_is_written_into_the_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    before = prepared.stamps(folder)
    load(folder, 0, common=True, check_digests=True)
    assert prepared.stamps(folder) == before


def test_a_flipped_bit_is_found_when_digests_are_checked(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    shard = folder / "model-rank-1-part-0.safetensors"
    name, (start, _) = next(iter(prepared.spans(shard).items()))
    prepared.flip(shard, start)
    load(folder, 1)
    load(folder, 0, check_digests=True)
    with pytest.raises(DataMismatch, match=name):
        load(folder, 1, check_digests=True)


def test_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with pytest.raises(InvalidUsage, match=r"no rank 2: it has 0, 1"):
        load(folder, 2)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / prepared.MANIFEST).unlink()
    with pytest.raises(DataMismatch, match="is not a prepared folder"):
        load(folder, 0)


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"format":"pt"', b'"format":"tf"'))


@pytest.mark.parametrize("damage", [remove, cut, change_header])
def test_a_shard_that_is_not_what_the_manifest_says_is_refused(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = folder_of(tmp_path)
    damage(folder / "model-rank-0-part-0.safetensors")
    with pytest.raises(DataMismatch, match=r"model-rank-0-part-0\.safetensors"):
        load(folder, 0)


def test_many_small_and_large_reads_fill_every_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiter_prep.engines.reading.GROUP_BYTES", 4096)
    folder = folder_of(tmp_path, max_shard_bytes=200_000)
    assert len(list(folder.glob("model-rank-0-part-*"))) > 1
    loaded = load(folder, 0)
    assert {name: raw(tensor) for name, tensor in loaded.items()} == stored(folder, 0)


def test_a_staging_buffer_fills_memory_that_system_calls_cannot_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiter_prep.engines import reading
    from aiter_prep.storage.reader import FolderReader

    monkeypatch.setattr(reading, "STAGING_BYTES", 1000)
    folder = folder_of(tmp_path)
    tensors = reading.stored_tensors(folder, read_manifest(folder), 0)
    memory = [(t, torch.zeros(t.total_bytes, dtype=torch.uint8)) for t in tensors]
    with FolderReader(folder) as reader:
        digests = reading._read_there(reader, memory)
    assert {t.record.name: raw(flat) for t, flat in memory} == stored(folder, 0)
    assert digests == {t.record.name: t.record.digest for t in tensors}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS[:4])
def test_loading_onto_a_gpu_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    folder = folder_of(tmp_path, kind)
    loaded = load(folder, 0, "cuda", check_digests=True)
    assert {tensor.device.type for tensor in loaded.values()} == {"cuda"}
    assert {name: raw(tensor.cpu()) for name, tensor in loaded.items()} == stored(folder, 0)


# --- attach -------------------------------------------------------------------------------------


class Packed(torch.nn.Parameter):  # type: ignore[misc,name-defined]
    """Mirrors vllm/model_executor/parameter.py::PackedvLLMParameter as far as it matters here."""

    def __new__(cls, data: Any, loader: Any) -> Any:  # noqa: ARG004  # as torch wants it
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: Any, loader: Any) -> None:  # noqa: ARG002
        self._weight_loader = loader
        self._packed_factor = 8

    @property
    def weight_loader(self) -> Any:
        """The loader, behind a property that cannot be set."""
        return self._weight_loader


def old_loader() -> None:
    """The loader of the parameter that goes."""


def stale_loader() -> None:
    """A loader that rides along on a tensor and must not survive."""


def module_with(**parameters: Any) -> Any:
    module = torch.nn.Module()
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    return module


def parameter(*shape: int, loader: Any = None, dtype: Any = None) -> Any:
    made = torch.nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)
    if loader is not None:
        made.weight_loader = loader
    return made


def shuffled(*shape: int, layout: str = "tile_16x16") -> Any:
    tensor = torch.ones(*shape)
    tensor.is_shuffled = True
    tensor.aiter_prep_layout = layout
    return tensor


def as_plain(tensor: Any) -> Any:
    return tensor


def as_parameter(tensor: Any) -> Any:
    made = torch.nn.Parameter(tensor, requires_grad=False)
    vars(made).update(vars(tensor))
    return made


def as_packed(tensor: Any) -> Any:
    made: Any = Packed(tensor, stale_loader)
    vars(made).update(vars(tensor))
    return made


@pytest.mark.parametrize("prefer_copy", [False, True])
@pytest.mark.parametrize("form", [as_plain, as_parameter, as_packed])
@pytest.mark.parametrize("shape", [(4, 8), (4, 6)], ids=["same-shape", "other-shape"])
def test_attaching_carries_flags_and_keeps_the_old_loader(
    form: Callable[[Any], Any], shape: tuple[int, int], prefer_copy: bool
) -> None:
    module = module_with(w=parameter(4, 8, loader=old_loader))
    result = attach(module, "w", form(shuffled(*shape)), prefer_copy=prefer_copy)
    assert result is module.w
    assert isinstance(module.w, torch.nn.Parameter)
    assert not module.w.requires_grad
    assert module.w.is_shuffled is True
    assert module.w.aiter_prep_layout == "tile_16x16"
    assert module.w.weight_loader is old_loader
    assert tuple(module.w.shape) == shape
    assert bool((module.w == 1).all())


@pytest.mark.parametrize("prefer_copy", [False, True])
def test_a_loader_on_the_new_tensor_never_survives(prefer_copy: bool) -> None:
    tensor = shuffled(4, 8)
    tensor.weight_loader = tensor._weight_loader = stale_loader
    module = module_with(w=parameter(4, 8, loader=old_loader), v=parameter(4, 8))
    attach(module, "w", tensor, prefer_copy=prefer_copy)
    attach(module, "v", tensor, prefer_copy=prefer_copy)
    attach(module, "new", tensor, prefer_copy=prefer_copy)
    assert module.w.weight_loader is old_loader
    assert not hasattr(module.w, "_weight_loader")
    assert not hasattr(module.v, "weight_loader")
    assert not hasattr(module.new, "weight_loader")


@pytest.mark.parametrize("prefer_copy", [False, True])
def test_a_packed_parameter_that_goes_leaves_its_loader(prefer_copy: bool) -> None:
    module = module_with(w=Packed(torch.zeros(4, 8), old_loader))
    attach(module, "w", shuffled(4, 8), prefer_copy=prefer_copy)
    assert module.w.weight_loader is old_loader
    assert module.w.is_shuffled is True
    assert isinstance(module.w, Packed) == prefer_copy


@pytest.mark.parametrize("prefer_copy", [False, True])
def test_a_parameter_handed_back_stays_as_it_is(prefer_copy: bool) -> None:
    module = module_with(w=parameter(4, 8, loader=old_loader))
    old, pointer = module.w, module.w.data_ptr()
    old.is_shuffled = True
    assert attach(module, "w", old, prefer_copy=prefer_copy) is old
    assert (module.w.data_ptr(), module.w.weight_loader) == (pointer, old_loader)
    assert module.w.is_shuffled is True


def test_prefer_copy_keeps_object_and_memory() -> None:
    module = module_with(w=parameter(4, 8))
    old, pointer = module.w, module.w.data_ptr()
    attach(module, "w", shuffled(4, 8), prefer_copy=True)
    assert module.w is old
    assert module.w.data_ptr() == pointer


def test_without_prefer_copy_the_tensor_itself_is_attached() -> None:
    module, tensor = module_with(w=parameter(4, 8)), shuffled(4, 8)
    attach(module, "w", tensor)
    assert module.w.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "old",
    [
        lambda: parameter(4, 6),
        lambda: parameter(4, 8, dtype=torch.bfloat16),
        lambda: torch.nn.Parameter(torch.zeros(8, 4).t(), requires_grad=False),
        lambda: torch.nn.Parameter(torch.zeros(4, 8, device="meta"), requires_grad=False),
    ],
    ids=["shape", "dtype", "stride", "device"],
)
def test_prefer_copy_replaces_what_it_cannot_fill(old: Callable[[], Any]) -> None:
    module, tensor = module_with(w=old()), shuffled(4, 8)
    attach(module, "w", tensor, prefer_copy=True)
    assert module.w.data_ptr() == tensor.data_ptr()
    assert module.w.is_shuffled is True


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float8_e8m0fnu", "float8_e4m3fnuz"])
def test_prefer_copy_copies_dtypes_that_torch_cannot_compute_with(dtype: str) -> None:
    zeros = torch.zeros(4, 8, dtype=torch.uint8).view(getattr(torch, dtype))
    ones = torch.ones(4, 8, dtype=torch.uint8).view(getattr(torch, dtype))
    module = module_with(w=torch.nn.Parameter(zeros, requires_grad=False))
    attach(module, "w", ones, prefer_copy=True)
    assert raw(module.w) == b"\1" * 32
    assert module.w.data_ptr() == zeros.data_ptr()


def test_a_copy_leaves_no_stale_flag() -> None:
    module = module_with(w=parameter(4, 8))
    attach(module, "w", shuffled(4, 8))
    attach(module, "w", torch.ones(4, 8), prefer_copy=True)
    assert not hasattr(module.w, "is_shuffled")
    assert not hasattr(module.w, "aiter_prep_layout")


def test_buffers_and_plain_tensors_make_way_for_the_parameter() -> None:
    module = torch.nn.Module()
    module.register_buffer("b", torch.zeros(2))
    module.t = torch.zeros(2)
    module.register_parameter("nothing", None)
    for name in ("b", "t", "nothing", "new"):
        attach(module, name, shuffled(4, 8))
    assert set(dict(module.named_parameters())) == {"b", "t", "nothing", "new"}
    assert not dict(module.named_buffers())


def test_a_loaded_tensor_keeps_its_flags_when_attached(tmp_path: Path) -> None:
    loaded = load(folder_of(tmp_path, "mxfp4_quark"), 0)
    name = next(name for name in loaded if name.endswith("w13_weight"))
    module = torch.nn.Module()
    attach(module, "w13_weight", loaded[name])
    assert module.w13_weight.is_shuffled is True
    assert module.w13_weight.data_ptr() == loaded[name].data_ptr()
