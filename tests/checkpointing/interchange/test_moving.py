"""Import and export of other tools' checkpoints: the original tools read our exports and write our imports."""

from __future__ import annotations

import errno
import json
import os
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpointing import Checkpoint, Committed, Store, open_checkpoint, open_store, verify
from checkpointing.errors import ForeignFormat, NotExportable, Superseded
from checkpointing.format.grid import TILE_BYTES
from checkpointing.interchange import Kind, Reader, Writer, export_checkpoint, import_checkpoint, transfer
from checkpointing.interchange import contents as reading
from checkpointing.interchange import safetensors_files as layout
from tests.checkpointing.interchange.samples import as_dcp_has_it, every_dtype, nested, same

SAFE = {name: value for name, value in every_dtype().items() if name not in ("complex32", "complex128")}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Use DCP without ranks on purpose, and silence torch's warnings about prototypes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def imported(store: Store, kind: str, source: Path, step: int = 0, tile_bytes: int = TILE_BYTES) -> Checkpoint:
    import_checkpoint(kind, source, store, step=step, tile_bytes=tile_bytes)
    return open_checkpoint(store)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Cut everything into many slabs, batches and parts; return the size of tiles to go with them."""
    monkeypatch.setattr(reading, "SLAB_TILES", 2)
    monkeypatch.setattr(reading, "BATCH_BYTES", 200)
    monkeypatch.setattr(transfer, "PART_BYTES", 300)
    return 48


def test_a_torch_save_file_survives_import_and_export(tmp_path: Path, store: Store) -> None:
    """Nesting, views, ties, integer keys, tuples and objects: torch.load returns what torch.save was given."""
    torch.save(nested(), tmp_path / "in.pt")
    checkpoint = imported(store, "torch", tmp_path / "in.pt", step=7)
    assert (checkpoint.step, checkpoint.facts) == (7, {"imported": {"kind": "torch"}})
    assert not list(verify(store))
    export_checkpoint("torch", checkpoint, tmp_path / "out.pt")
    for mapped in (False, True):
        same(torch.load(tmp_path / "out.pt", weights_only=True, mmap=mapped), nested())
    # Readers other than torch's compare the checksums of the archive.
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None


def test_a_dcp_folder_survives_import_and_export(tmp_path: Path, store: Store) -> None:
    """A folder that DCP wrote is imported; DCP loads the export, also as a file in its single-file format."""
    dcp.save(nested(), checkpoint_id=tmp_path / "in")
    export_checkpoint("dcp", imported(store, "dcp", tmp_path / "in"), tmp_path / "out")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    same(torch.load(tmp_path / "out.pt", weights_only=True), as_dcp_has_it(nested()))
    state = {"model": {"table": torch.zeros(4, 6)}, "epoch": 0}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    same(state, {"model": {"table": nested()["model"]["table"]}, "epoch": 3})


def test_a_checkpoint_saved_by_our_writer_is_exported_as_dcp(tmp_path: Path) -> None:
    """DCP's own reader loads it, and so does Reader."""
    dcp.save(nested(), storage_writer=Writer(str(tmp_path / "store"), step=1))
    checkpoint = open_checkpoint(open_store(str(tmp_path / "store"), write=False))
    export_checkpoint("dcp", checkpoint, tmp_path / "out")
    for reader in (dcp.FileSystemReader(tmp_path / "out"), Reader(str(tmp_path / "store"))):
        state = nested()
        for part in (state["model"], *state["optimizer"]["state"].values()):
            for tensor in part.values():
                tensor.detach().zero_()
        state |= {"epoch": 0, "rng": [torch.zeros(3).long(), 1]}
        dcp.load(state, storage_reader=reader)
        same(state, nested())


def test_a_safetensors_file_survives_import_and_export(tmp_path: Path, store: Store) -> None:
    """Every dtype of the package keeps its bytes, fp8 and bf16 among them."""
    (tmp_path / "in.safetensors").write_bytes(safetensors.torch.save(SAFE, metadata={"format": "pt"}))
    checkpoint = imported(store, "safetensors", tmp_path / "in.safetensors")
    export_checkpoint("safetensors", checkpoint, tmp_path / "out.safetensors")
    same(safetensors.torch.load_file(tmp_path / "out.safetensors"), SAFE)
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_hugging_face_shards_survive_import_and_export(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, small_parts: int
) -> None:
    """With their index as Hugging Face lays it out; DCP's reader of that layout loads them."""
    monkeypatch.setattr(layout, "SHARD_BYTES", 120)
    source = tmp_path / "in"
    source.mkdir()
    weights = {name: value for name, value in SAFE.items() if name in ("float32", "bfloat16", "int64", "uint8")}
    index: dict[str, str] = {}
    for number, (name, value) in enumerate(weights.items(), start=1):
        file = f"model-{number:05d}-of-{len(weights):05d}.safetensors"
        (source / file).write_bytes(safetensors.torch.save({name: value}, metadata={"format": "pt"}))
        index[name] = file
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    checkpoint = imported(store, "safetensors", source, tile_bytes=small_parts)
    index_file = source / "model.safetensors.index.json"
    again = import_checkpoint("safetensors", index_file, store, tile_bytes=small_parts)
    assert (again.root, again.moved) == (checkpoint.root, False)
    export_checkpoint("safetensors", checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(written["weight_map"]) == set(weights)
    assert written["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    assert len(set(written["weight_map"].values())) > 1
    read = {}
    for file in set(written["weight_map"].values()):
        read |= safetensors.torch.load_file(tmp_path / "out" / file)
    same(read, weights)
    state = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "out")))
    same(state, weights)


def test_a_small_export_is_one_file_without_an_index(tmp_path: Path, store: Store) -> None:
    """As Hugging Face does it; a folder without an index is imported too."""
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    export_checkpoint("safetensors", imported(store, "torch", tmp_path / "in.pt"), tmp_path / "out", prefix="")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert imported(store, "safetensors", tmp_path / "out", step=1).specs.keys() >= {"w"}


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("state", [{"all": SAFE}, nested()], ids=["dtypes", "nested"])
def test_an_exported_import_imports_as_the_same_checkpoint(
    kind: Kind, state: dict[str, object], tmp_path: Path, small_parts: int
) -> None:
    """The root, which names every tensor, object and fact, is the same, even with tiny slabs and parts."""
    state = as_dcp_has_it(state)
    torch.save(state, tmp_path / "in.pt")
    first, second = open_store(str(tmp_path / "first")), open_store(str(tmp_path / "second"))
    facts = {"run": "größe"}
    one = import_checkpoint("torch", tmp_path / "in.pt", first, facts=facts, tile_bytes=small_parts)
    suffix = ".safetensors" if kind is Kind.SAFETENSORS else ""
    export_checkpoint(kind, open_checkpoint(first), tmp_path / f"out{suffix}")
    given_facts = None if kind is Kind.SAFETENSORS else facts
    two = import_checkpoint(kind, tmp_path / f"out{suffix}", second, facts=given_facts, tile_bytes=small_parts)
    assert two.root == one.root
    assert one.totals.tiles > 20


def test_every_dtype_survives_torch_and_dcp(tmp_path: Path, store: Store) -> None:
    """The format has all dtypes of torch, and so do both of its files; safetensors names those it lacks."""
    torch.save(every_dtype(), tmp_path / "in.pt")
    checkpoint = imported(store, "torch", tmp_path / "in.pt")
    export_checkpoint("torch", checkpoint, tmp_path / "out.pt")
    same(torch.load(tmp_path / "out.pt", weights_only=True), every_dtype())
    export_checkpoint("dcp", checkpoint, tmp_path / "out")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "again.pt")
    same(torch.load(tmp_path / "again.pt", weights_only=True), every_dtype())
    with pytest.raises(NotExportable, match=r"2 tensors.*complex128: complex128 \[3, 4\]; complex32: complex32"):
        export_checkpoint("safetensors", checkpoint, tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_files_saved_without_checksums_survive(kind: str, tmp_path: Path, store: Store) -> None:
    """Those who save large files may tell torch not to compute them."""
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(nested(), tmp_path / "torch")
        dcp.save(nested(), checkpoint_id=tmp_path / "dcp")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "torch") as archive:
        assert archive.testzip() is not None
    export_checkpoint("torch", imported(store, kind, tmp_path / kind), tmp_path / "out.pt")
    saved = nested() if kind == "torch" else as_dcp_has_it(nested())
    same(torch.load(tmp_path / "out.pt", weights_only=True), saved)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_prefix_exports_only_the_model(kind: Kind, tmp_path: Path, store: Store) -> None:
    """Tensors under the prefix lose it; nothing else is exported, objects included."""
    torch.save({"model": {"w": torch.ones(3), "v": torch.zeros(2)}, "epoch": 1, "w": torch.ones(1)}, tmp_path / "in.pt")
    export_checkpoint(kind, imported(store, "torch", tmp_path / "in.pt"), tmp_path / "out", prefix="model.")
    other = open_store(str(tmp_path / "other"))
    assert set(imported(other, kind, tmp_path / "out").specs) - {"object/paths"} == {"w", "v"}


def test_an_import_reports_progress_and_resumes_after_a_failure(tmp_path: Path, small_parts: int) -> None:
    """Progress ends at the total; a retry writes only the missing parts."""
    torch.save({"w": torch.arange(400.0)}, tmp_path / "in.pt")
    store = open_store(str(tmp_path / "store"))
    seen: list[tuple[int, int]] = []

    def give_up(done: int, total: int) -> None:
        seen.append((done, total))
        if done > 800:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_checkpoint("torch", tmp_path / "in.pt", store, tile_bytes=small_parts, progress=give_up)
    before = {name: (tmp_path / "store" / name).stat().st_ino for name in store.list("")}
    assert before

    def go_on() -> Committed:
        return import_checkpoint(
            "torch", tmp_path / "in.pt", store, tile_bytes=small_parts, progress=lambda *now: seen.append(now)
        )

    done = go_on()
    assert seen[-1] == (1600, 1600)
    assert done.moved
    assert all((tmp_path / "store" / name).stat().st_ino == inode for name, inode in before.items())
    assert not go_on().moved


def test_an_import_fences_nobody_out(tmp_path: Path, store: Store) -> None:
    """It uses the store's own generation, and is refused before anything is read if the store is ahead."""
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    dcp.save({"w": torch.zeros(3)}, storage_writer=Writer(store, step=9, generation=4))
    with pytest.raises(Superseded, match="latest is at step 9"):
        import_checkpoint("torch", tmp_path / "in.pt", store, step=8)
    assert import_checkpoint("torch", tmp_path / "in.pt", store, step=10).ref.generation == 4


def test_an_export_is_atomic(tmp_path: Path, store: Store) -> None:
    """Nothing is overwritten; a damaged tile leaves no file behind."""
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    checkpoint = imported(store, "torch", tmp_path / "in.pt")
    (tmp_path / "taken").mkdir()
    with pytest.raises(NotExportable, match="is there already"):
        export_checkpoint("dcp", checkpoint, tmp_path / "taken")
    for kind in Kind:
        with pytest.raises(NotExportable, match="cannot be written: "):
            export_checkpoint(kind, checkpoint, tmp_path / "absent" / "out")
    (pack,) = (tmp_path / "store" / "packs").rglob("*.pack")
    pack.write_bytes(pack.read_bytes().replace(torch.ones(3).numpy().tobytes(), b"\0" * 12))
    before = sorted(tmp_path.iterdir())
    for kind in Kind:
        with pytest.raises(Exception, match="no source has a good copy"):
            export_checkpoint(kind, checkpoint, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", [Kind.TORCH, Kind.DCP])
@pytest.mark.parametrize("links", [True, False])
def test_what_comes_to_the_place_of_an_export_meanwhile_stays(
    kind: Kind, links: bool, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another export to the same name may end first; a file system without hard links is no obstacle."""
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    checkpoint = imported(store, "torch", tmp_path / "in.pt")
    out = tmp_path / "out"

    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", link)

    def end_first(done: int, total: int) -> None:
        if not out.exists():
            export_checkpoint(kind, checkpoint, out)

    with pytest.raises(NotExportable, match="is there already; nothing is overwritten"):
        export_checkpoint(kind, checkpoint, out, progress=end_first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out", "store"]


@pytest.mark.parametrize("kind", [Kind.TORCH, Kind.DCP])
def test_tied_tensors_stay_tied(kind: Kind, tmp_path: Path, store: Store) -> None:
    """Tensors that share memory are in the exported file once, whether imported or saved through DCP."""
    weight = torch.rand(300, 40)
    state = {"embed": weight, "head": weight, "like": weight.clone(), "part": weight[:10], "norm": torch.ones(3)}
    torch.save(state, tmp_path / "in.pt")
    other = open_store(str(tmp_path / "other"))
    dcp.save(state, storage_writer=Writer(other, step=1))
    for number, checkpoint in enumerate((imported(store, "torch", tmp_path / "in.pt"), open_checkpoint(other))):
        out = tmp_path / f"out{number}"
        export_checkpoint(kind, checkpoint, out)
        again = imported(open_store(str(tmp_path / f"again{number}")), kind, out)
        export_checkpoint("torch", again, tmp_path / f"{number}.pt")
        loaded = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        same(loaded, state)
        assert loaded["embed"].data_ptr() == loaded["head"].data_ptr() != loaded["like"].data_ptr()
        written = sum(file.stat().st_size for file in ([out] if out.is_file() else out.iterdir()))
        assert written < 2.5 * weight.nbytes


def test_ties_between_different_tensors_are_dropped(tmp_path: Path, store: Store) -> None:
    """They were recorded when the tensors were equal; a prefix keeps the ties among its tensors."""
    weight = torch.rand(4, 3)
    torch.save({"model": {"a": weight, "b": weight}}, tmp_path / "in.pt")
    checkpoint = imported(store, "torch", tmp_path / "in.pt")
    export_checkpoint("torch", checkpoint, tmp_path / "out.pt", prefix="model.")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    contents = reading.Contents(checkpoint)
    assert contents.ties() == {"model.b": "model.a"}
    contents._offers["model.b"] = []
    assert contents.ties() == {}


def test_a_hugging_face_export_holds_only_tensors(tmp_path: Path) -> None:
    """Objects are left out and counted; a single file of ours keeps them."""
    store = open_store(str(tmp_path / "store"))
    dcp.save({"model": {"w": torch.ones(3)}, "epoch": 3}, storage_writer=Writer(store, step=1))
    done = export_checkpoint("safetensors", open_checkpoint(store), tmp_path / "out")
    assert (done.tensors, done.left_out) == (1, 1)
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").keys() == {"model.w"}
    done = export_checkpoint("safetensors", open_checkpoint(store), tmp_path / "out.safetensors")
    assert done.left_out == 0
    assert "epoch" in reading.Contents(imported(open_store(str(tmp_path / "b")), "safetensors", done.target)).objects


def test_unrelated_files_are_not_merged(tmp_path: Path, store: Store) -> None:
    """An adapter beside a model is not part of it; shards without an index are one model if none is missing."""
    source = tmp_path / "in"
    source.mkdir()
    for name in ("model-00001-of-00002", "model-00002-of-00002", "adapter_model"):
        (source / f"{name}.safetensors").write_bytes(safetensors.torch.save({f"{name}.w": torch.ones(2)}))
    with pytest.raises(ForeignFormat, match=r"3 files of safetensors and no index.*adapter_model\.safetensors"):
        import_checkpoint("safetensors", source, store)
    assert imported(store, "safetensors", source / "adapter_model.safetensors").specs.keys() == {"adapter_model.w"}
    (source / "adapter_model.safetensors").unlink()
    assert len(imported(store, "safetensors", source, step=1).specs) == 2
    (source / "model-00001-of-00002.safetensors").unlink()
    (source / "model-00003-of-00003.safetensors").write_bytes(safetensors.torch.save({"x": torch.ones(2)}))
    with pytest.raises(ForeignFormat, match="no index"):
        import_checkpoint("safetensors", source, store, step=2)


def test_safetensors_written_by_torch_are_imported(tmp_path: Path, store: Store) -> None:
    """DCP's folder with the format SAFETENSORS, and a rank's own Hugging Face file with offsets in it."""
    state = {"w": torch.rand(4, 3), "v": torch.ones(2, dtype=torch.bfloat16), "epoch": 3}
    form = SerializationFormat.SAFETENSORS
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp", serialization_format=form))
    read = {"w": torch.zeros(4, 3), "v": torch.zeros(2, dtype=torch.bfloat16), "epoch": 0}
    dcp.load(read, storage_reader=Reader(str(tmp_path / "store"), imported(store, "dcp", tmp_path / "dcp").name))
    same(read, state)
    source = tmp_path / "hf"
    source.mkdir()
    for number, rows in enumerate((slice(0, 3), slice(3, 4)), start=1):
        sharding = json.dumps({"w": {"saved_offsets": [rows.start, 0]}, "v": {"saved_offsets": [0]}})
        data = {"w": state["w"][rows].clone(), "v": state["v"]}
        file = source / f"shard-{number:05d}-model-00001-of-00001.safetensors"
        file.write_bytes(safetensors.torch.save(data, metadata={"DCP_SHARDING_INFO": sharding}))
    del read["epoch"], state["epoch"]
    read["w"].zero_()
    dcp.load(read, storage_reader=Reader(str(tmp_path / "store"), imported(store, "safetensors", source, 1).name))
    same(read, state)
