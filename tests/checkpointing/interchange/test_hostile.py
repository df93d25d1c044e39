"""Damaged, truncated and malicious files are refused by name, and nothing in them is run or imported."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)

from checkpointing import Store, open_checkpoint, open_store, read_latest
from checkpointing.errors import ForeignFormat, Unloadable
from checkpointing.interchange import dcp_metadata, export_checkpoint, import_checkpoint, torch_files
from checkpointing.interchange.folders import locate_all
from checkpointing.interchange.torch_files import load_without_data


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


class Attribute:
    """Is an attribute of something when it is unpickled."""

    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self.of, self.name)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def refuses(kind: str, source: Path, store: Store, said: str) -> None:
    with pytest.raises(ForeignFormat, match=said):
        import_checkpoint(kind, source, store)
    assert read_latest(store) is None


def folder(tmp_path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=tmp_path / "in")
    return tmp_path / "in"


def change(folder: Path, how: Callable[[Any], None]) -> None:
    """Change the metadata of a DCP folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_missing_and_empty_inputs_are_refused(kind: str, tmp_path: Path, store: Store) -> None:
    """No file, an empty one, an empty folder, one of random bytes."""
    refuses(kind, tmp_path / "absent", store, "there is no such file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 9)
    if kind != "torch":
        refuses(kind, tmp_path / "folder", store, "folder")
    if kind != "dcp":
        refuses(kind, tmp_path / "empty", store, "empty: is no|empty: is damaged")
        refuses(kind, tmp_path / "noise", store, "noise: is no|noise: is damaged")


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, store: Store) -> None:
    """Neither a torch.save file nor DCP's metadata nor an object in it is executed."""
    harm = Runs(tmp_path / "harmed")
    torch.save({"w": torch.ones(2), "x": harm}, tmp_path / "in.pt")
    refuses("torch", tmp_path / "in.pt", store, "holds more than tensors and plain data")
    source = folder(tmp_path, {"w": torch.ones(2), "x": harm})
    good = (source / ".metadata").read_bytes()
    for place in ("planner_data", "storage_meta"):
        (source / ".metadata").write_bytes(good)
        change(source, lambda metadata, place=place: setattr(metadata, place, harm))
        refuses("dcp", source, store, r"its pickle names \w+.mkdir")
    (source / ".metadata").write_bytes(good)
    import_checkpoint("dcp", source, store)
    assert "object/torch/x" in open_checkpoint(store).specs
    with pytest.raises(Unloadable, match=r"x: is a pickle that torch refuses.*add_safe_globals"):
        export_checkpoint("torch", open_checkpoint(store), tmp_path / "out.pt")
    assert not (tmp_path / "harmed").exists()


def test_dcp_metadata_is_read_without_touching_its_classes() -> None:
    """Paths and all fields are read; a pickle that sets attributes of a class sets them on a copy."""
    known = Metadata({}, storage_meta=StorageMeta(checkpoint_id=Path("/a/b")), planner_data={"a": ("b", 0)})
    known.storage_data = {MetadataIndex("a", [0, 1]): TensorProperties(dtype=torch.bfloat16)}
    metadata = dcp_metadata.load(pickle.dumps(known), "x")
    assert metadata.paths == {"a": ("b", 0)}
    assert metadata.places["a", (0, 1)].dtype is torch.bfloat16
    before = Metadata.__init__
    harm = pickle.dumps(Metadata, protocol=2)[:-1] + b"(N}X\x08\x00\x00\x00__init__K\x01stb."
    with pytest.raises(ForeignFormat, match="x: "):
        dcp_metadata.load(harm, "x")
    assert Metadata.__init__ is before
    for forbidden in (eval, torch.load, collections.Counter, type(None), Attribute(Metadata, "__init__")):
        with pytest.raises(ForeignFormat, match="which DCP does not write"):
            dcp_metadata.load(pickle.dumps(forbidden), "x")


@pytest.mark.parametrize("written", ["by value", "by name"])
def test_a_memory_format_is_read_however_python_writes_it(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2, Debian 12's, writes members of enumerations as attributes of their class, others by value."""
    formats = _MEM_FORMAT_ENCODING
    how = {
        "by value": lambda member, protocol: (formats, (member.value,)),
        "by name": lambda member, protocol: (getattr, (formats, member.name)),
    }
    monkeypatch.setattr(formats, "__reduce_ex__", how[written])
    data = pickle.dumps(Metadata({"a": TensorProperties(memory_format=torch.channels_last)}, storage_data={}))
    assert (b"getattr" in data) is (written == "by name")
    assert dcp_metadata.load(data, "x").entries["a"].memory_format is torch.channels_last


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda m: m.storage_data.clear(), r"does not say where w\[0\] lies"),
        (lambda m: setattr(m, "storage_data", None), "does not say where its data lies"),
        (lambda m: [setattr(i, "relative_path", "../x") for i in m.storage_data.values()], "not a file in its folder"),
        (lambda m: [setattr(i, "relative_path", "/etc/passwd") for i in m.storage_data.values()], "not a file in its"),
        (lambda m: [setattr(i, "relative_path", "gone") for i in m.storage_data.values()], "gone: is missing"),
        (lambda m: [setattr(i, "offset", -1) for i in m.storage_data.values()], "lies at no place in a file"),
        (lambda m: [setattr(i, "offset", 1 << 40) for i in m.storage_data.values()], "distcp: w: is no file"),
        (lambda m: [setattr(i, "transform_descriptors", ["zstd"]) for i in m.storage_data.values()], "zstd"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([5])), "no rank saved w"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", "many"), "w: .* many cannot be kept"),
        (lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.float64), "says float64"),
        (lambda m: setattr(m.state_dict_metadata["w"].chunks[0], "sizes", torch.Size([9])), "chunk that is not in it"),
        (lambda m: m.state_dict_metadata.update({7: m.state_dict_metadata["w"]}), "7 is no name"),
    ],
)  # fmt: skip
def test_false_dcp_metadata_is_refused(how: Callable[[Any], None], said: str, tmp_path: Path, store: Store) -> None:
    """Each false statement is named; nothing is committed."""
    source = folder(tmp_path, {"w": torch.ones(4)})
    change(source, how)
    with pytest.raises(Exception, match=said):
        import_checkpoint("dcp", source, store)
    assert read_latest(store) is None


def header(entries: dict[str, Any], data: bytes = b"\0" * 16) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int = 0, end: int = 16, shape: Any = (4,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (header({"w": entry()}, b"\0" * 15), "it is cut short, or has a tail"),
        (header({"w": entry()}, b"\0" * 17), "it is cut short, or has a tail"),
        (header({"w": entry(0, 8, [2]), "v": entry(12, 16, [1])}), "v does not begin where the tensor before it ends"),
        (header({"w": entry(), "v": entry()}), "does not begin where"),
        (header({"w": entry(shape=[5])}), "16 bytes are not those of float32"),
        (header({"w": entry(shape=[-4])}), "no number from 0"),
        (header({"w": entry(shape=[2**40, 2**40])}), "16 bytes are not those"),
        (header({"w": entry(shape=[4.0])}), "no number from 0"),
        (header({"w": entry(shape=None)}), "damaged"),
        (header({"w": entry(dtype="F6_E2M3")}), r"w: dtype F6_E2M3 \[4\] cannot be kept"),
        (header({"w": entry(0, 2, dtype="F4", shape=[3])}), r"F4 \[3\] cannot be kept: not pairs of values"),
        (header({"w": 3}), "damaged"),
        (header({})[:8] + b"[]", "no safetensors file|damaged|tail"),
        ((10**17).to_bytes(8, "little") + b"{}", "no safetensors file"),
        (header({"w": entry(), "__metadata__": 5}), "damaged: its __metadata__ is no object"),
        (header({"w": entry(), "__metadata__": ["elastic3d.facts"]}), "damaged: its __metadata__ is no object"),
        (header({"w": entry(), "__metadata__": {"elastic3d.facts": '{"a": NaN}'}}), "its facts are no JSON"),
        (header({"w": entry(), "__metadata__": {"elastic3d.facts": r'{"a": "\ud800"}'}}), "its facts are no JSON"),
        (header({"a\nb": entry()}), r"in.safetensors: 'a\\nb': a name has at most 4,096 printable characters here"),
        (header({"\ud800": entry()}), r"'\\ud800': a name has at most 4,096 printable"),
        (header({"x" * 5000: entry()}), r"xx\.\.\.: a name has at most 4,096 printable"),
        (header({"w": entry()}).replace(b'{"w"', b'{"w":{},"w"').replace(b"E\0", b"M\0"), "damaged|twice"),
    ],
)  # fmt: skip
def test_false_safetensors_headers_are_refused(data: bytes, said: str, tmp_path: Path, store: Store) -> None:
    """Sizes, places and types must agree with one another and with the file."""
    (tmp_path / "in.safetensors").write_bytes(data)
    refuses("safetensors", tmp_path / "in.safetensors", store, said)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "no index of shards"),
        ('{"weight_map": {"w": "../a.safetensors"}}', "not a file beside it"),
        ('{"weight_map": {"w": "b.safetensors"}}', "shards are missing: b.safetensors"),
        ('{"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}', "says it holds v, and it does not"),
        ('{"weight_map": {"w": 3}}', "no index of shards"),
    ],
)
def test_a_false_index_of_shards_is_refused(index: str, said: str, tmp_path: Path, store: Store) -> None:
    """All shards must lie beside their index and hold what it says."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.safetensors").write_bytes(header({"w": entry()}))
    (tmp_path / "in" / "model.safetensors.index.json").write_text(index)
    refuses("safetensors", tmp_path / "in", store, said)


def test_a_file_truncated_during_an_import_is_an_error(tmp_path: Path, store: Store) -> None:
    """Missing ranges raise an error, not a signal; so do ranges that a pickle invents."""
    torch.save({"w": torch.ones(64, 64).t(), "v": torch.ones(9000)}, tmp_path / "in.pt")
    data = (tmp_path / "in.pt").read_bytes()

    def cut(done: int, total: int) -> None:
        os.truncate(tmp_path / "in.pt", 20_000)

    for size in (len(data) - 10, len(data) // 2, 100):
        (tmp_path / "in.pt").write_bytes(data[:size])
        refuses("torch", tmp_path / "in.pt", store, "in.pt: is no file of torch.save, is cut short")
    (tmp_path / "in.pt").write_bytes(data)
    with pytest.raises(ForeignFormat, match="is cut short"):
        import_checkpoint("torch", tmp_path / "in.pt", store, progress=cut)


def test_a_damaged_byte_of_a_pickle_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """Whatever torch's unpickler makes of it: nothing but ForeignFormat comes out, or a state that can be read."""
    state = {"m": {"w": torch.ones(3, 4), "b": torch.ones(3)}, "step": 3, "x": (1, "a"), "lr": [0.1]}
    torch.save(state, tmp_path / "in.pt")
    good = (tmp_path / "in.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "in.pt") as archive:
        pickled = archive.read("in/data.pkl")
    begin = good.index(pickled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place in range(begin, begin + len(pickled)):
            for byte in (0, 6, 24, 71, 82, 255):
                (tmp_path / "in.pt").write_bytes(good[:place] + bytes([byte]) + good[place + 1 :])
                with contextlib.suppress(ForeignFormat):
                    torch_files.read(tmp_path / "in.pt")


def packed_anew(source: Path, how: str) -> None:
    """Write a file of torch.save again as another program would, with equal members."""
    data = source.read_bytes()
    if how == "in another order":
        # Two members of equal sizes have changed places; all others lie where they did.
        for old, new in ((b"data/1", b"data/X"), (b"data/2", b"data/1"), (b"data/X", b"data/2")):
            data = data.replace(old, new)
        source.write_bytes(data)
        return
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(source, "w", int(how)) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


@pytest.mark.parametrize("how", [str(zipfile.ZIP_STORED), str(zipfile.ZIP_DEFLATED), "in another order"])
def test_a_file_that_was_packed_anew_is_never_read_as_other_bytes(how: str, tmp_path: Path, store: Store) -> None:
    """torch looks members up by name; where they lie is not what it adds up from their sizes."""
    state = {f"w{number}": torch.full((5,), float(number)) for number in range(6)}
    torch.save(state, tmp_path / "in.pt")
    locate_all(tmp_path / "in.pt")
    packed_anew(tmp_path / "in.pt", how)
    assert torch.load(tmp_path / "in.pt").keys() == state.keys(), "torch reads it"
    refuses("torch", tmp_path / "in.pt", store, "was packed anew by another tool; load the file and save it again")
    with pytest.raises(ForeignFormat, match="was packed anew by another tool"):
        locate_all(tmp_path / "in.pt")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ([torch.ones(2)], "holds a list, not a state dict"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two entries of the state dict are called 'a.b'"),
        ({"a": (torch.ones(1),)}, "a tensor inside a tuple cannot be kept"),
        ({1.5: torch.ones(1)}, "only text and whole numbers"),
        ({"s": torch.eye(2).to_sparse()}, "s: torch.sparse_coo"),
        ({"c": torch.ones(2, dtype=torch.complex64).conj()}, "c: .* conjugated cannot be kept"),
        ({"b": torch.empty(2, dtype=torch.bits8)}, r"b: torch.strided torch.bits8 \[2\] cannot be kept"),
        ({"s": torch.ones(2).untyped_storage()}, "s: a tensor inside a TypedStorage cannot be kept"),
        ({"a\nb": torch.ones(1)}, r"in.pt: 'a\\nb': a name has at most 4,096 printable characters here"),
        ({"w": torch.ones(1), "a\nb": 3}, r"in.pt: 'a\\nb': a name has at most 4,096 printable characters here"),
        ({}, "holds nothing"),
    ],
)
def test_states_that_cannot_be_exported_unchanged_are_refused(
    state: Any, said: str, tmp_path: Path, store: Store
) -> None:
    """Nothing is left out, cast or renamed silently."""
    torch.save(state, tmp_path / "in.pt")
    refuses("torch", tmp_path / "in.pt", store, said)


def test_fake_tensors_give_the_same_offsets(tmp_path: Path) -> None:
    """A torch whose meta tensors do not know the offsets of their bytes gets them another way."""
    torch.save({"a": torch.ones(5), "b": torch.ones(3, 4)[1:].t()}, tmp_path / "in.pt")
    views = []
    for fake in (False, True):
        with (tmp_path / "in.pt").open("rb") as file:
            state = load_without_data(file, "in.pt", fake=fake).value
        views.append([(t.untyped_storage()._checkpoint_offset, t.storage_offset(), t.stride()) for t in state.values()])
    assert views[0] == views[1]
