"""Writer and Reader in one process: what they refuse, and how they say it."""

from __future__ import annotations

import collections
import datetime
import enum
import io
import math
import pickle
import random
import warnings
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from checkpointing import open_checkpoint, open_store, read_latest
from checkpointing.errors import NotExportable, Unloadable
from checkpointing.interchange import Reader, Writer, export_checkpoint, objects
from checkpointing.saving.options import SaveOptions
from checkpointing.stores.register import StoreRegister
from tests.checkpointing.interchange.samples import every_dtype, same


class Own:
    """A class that no unpickler of data allows."""

    ran = False

    def __setstate__(self, state: Any) -> None:
        Own.ran = True


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield


def cause(raised: pytest.ExceptionInfo[dcp.CheckpointException]) -> BaseException:
    """Return the error of one rank inside DCP."""
    (failure,) = raised.value.failures.values()
    return failure[0]


def test_every_dtype_and_shape_is_restored(tmp_path: Path) -> None:
    """All dtypes, a scalar, an empty tensor, a transposed target: the bytes are those that were saved."""
    state = {**every_dtype(), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.rand(5, 3).t()}
    dcp.save(state, storage_writer=Writer(str(tmp_path), step=1))
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    assert not loaded["turned"].is_contiguous()
    dcp.load(loaded, storage_reader=Reader(str(tmp_path)))
    same(loaded, state)
    same(_load_state_dict_from_keys(storage_reader=Reader(str(tmp_path))), state)


def test_objects_are_stored_as_json_where_possible(tmp_path: Path) -> None:
    """Values that JSON would change are torch pickles; both are restored unchanged."""
    state = {
        "epoch": 3,
        "lr": 0.1,
        "names": ["a", "ü", None, True],
        "betas": (0.9, 0.99),
        "big": 2**80,
        "nan": [1, "x"],
    }
    dcp.save(dict(state), storage_writer=Writer(str(tmp_path), step=1))
    keys = open_checkpoint(open_store(str(tmp_path), write=False)).specs.keys()
    assert {key for key in keys if key.startswith("object/torch/")} == {"object/torch/betas"}
    loaded = dict.fromkeys(state)
    dcp.load(loaded, storage_reader=Reader(str(tmp_path)))
    assert loaded == state


def test_a_user_class_is_refused_at_save_unless_allowed(tmp_path: Path) -> None:
    """By name, with what to do, before anything is written; if allowed it is saved, and loaded where allowed."""
    state = {"mine": Own(), "w": torch.ones(2)}
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save(state, storage_writer=Writer(str(tmp_path), step=1))
    assert "1 entries are not saved" in str(cause(raised))
    assert "mine: tests.checkpointing.interchange.test_dcp.Own" in str(cause(raised))
    assert "add_safe_globals" in str(cause(raised))
    assert not list(tmp_path.rglob("*.pack"))
    with torch.serialization.safe_globals([Own]):
        dcp.save(state, storage_writer=Writer(str(tmp_path), step=1))
    Own.ran = False
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load({"mine": None, "w": torch.zeros(2)}, storage_reader=Reader(str(tmp_path)))
    assert "mine: is a pickle that torch refuses" in str(cause(raised))
    assert "add_safe_globals" in str(cause(raised))
    assert not Own.ran
    loaded: dict[str, Any] = {"w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=Reader(str(tmp_path)))
    same(loaded, {"w": torch.ones(2)})
    with torch.serialization.safe_globals([Own]):
        loaded = {"mine": None}
        dcp.load(loaded, storage_reader=Reader(str(tmp_path)))
    assert isinstance(loaded["mine"], Own)


class Phase(enum.StrEnum):
    """A part of a training."""

    WARMUP = "warmup"


class Parts(enum.Flag):
    """Parts of a model."""

    HEAD = enum.auto()
    TAIL = enum.auto()


def beside_tensors() -> dict[str, Any]:
    """Return values that training states hold and that are neither tensors nor JSON."""
    return {
        "array": np.arange(6, dtype="i2").reshape(2, 3).T,
        "record": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        "scalar": np.float32(1.5),
        "when": np.datetime64("2026-01-02T03:04"),
        "numpy": (np.random.RandomState(3).get_state(), np.random.PCG64(4).state),
        "python": random.Random(5).getstate(),
        "times": (
            datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC")),
            datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
            datetime.date(2026, 1, 2),
            datetime.timedelta(days=-1, microseconds=3),
        ),
        "path": Path("/data/größe"),
        "phase": Phase.WARMUP,
        "parts": Parts.HEAD | Parts.TAIL,
        "mixed": ({1: {2, 3}, "$": b"\x00\xff"}, collections.OrderedDict(a=Path("b")), 1j, math.inf, "\ud800"),
        "dtype": (torch.bfloat16, torch.device("cpu"), np.int64(3)),
    }


def test_common_non_tensor_values_are_restored_without_pickle(tmp_path: Path) -> None:
    """numpy values, dates, paths, enums and in-memory files are restored unchanged."""
    file = io.BytesIO(b"losses")
    file.seek(2)
    state = {**beside_tensors(), "file": file, "w": torch.ones(2)}
    dcp.save(dict(state), storage_writer=Writer(str(tmp_path), step=1))
    loaded = {**dict.fromkeys(state), "w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=Reader(str(tmp_path)))
    buffer = loaded.pop("file")
    assert (buffer.getvalue(), buffer.tell()) == (b"losses", 2)
    for key, value in beside_tensors().items():
        equal(loaded[key], value, key)
    keys = open_checkpoint(open_store(str(tmp_path), write=False)).specs.keys()
    # torch's restricted unpickler has always accepted ints in tuples.
    assert {key for key in keys if key.startswith("object/torch/")} <= {"object/torch/python"}


def equal(left: Any, right: Any, where: str) -> None:
    assert type(left) is type(right), where
    if isinstance(right, np.ndarray):
        assert left.dtype == right.dtype, where
        assert np.array_equal(left, right), where
    elif isinstance(right, dict):
        assert list(left) == list(right), where
        for key in right:
            equal(left[key], right[key], f"{where}.{key}")
    elif isinstance(right, list | tuple):
        assert len(left) == len(right), where
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            equal(one, other, f"{where}.{number}")
    else:
        assert left == right, where


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_states_with_such_values_are_exported(kind: str, tmp_path: Path) -> None:
    """torch's own tools read them, if the person allows loading more than tensors."""
    state = {"array": np.arange(3), "path": Path("a"), "w": torch.ones(2)}
    dcp.save(dict(state), storage_writer=Writer(str(tmp_path / "store"), step=1))
    out = tmp_path / "out"
    export_checkpoint(kind, open_checkpoint(open_store(str(tmp_path / "store"), write=False)), out)
    if kind == "torch":
        loaded = torch.load(out, weights_only=False)
    else:
        loaded = {"array": None, "path": None, "w": torch.zeros(2)}
        dcp.load(loaded, checkpoint_id=out)
    equal(loaded["array"], state["array"], "array")
    assert loaded["path"] == Path("a")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ('{"$":"enum","module":"os","class":"system","name":"x"}', "enum os.system is not there"),
        ('{"$":"enum","module":"not.imported","class":"E","name":"x"}', "import its module before you load"),
        ('{"$":"array","npy":"AAAA"}', "is not what elastic3d writes"),
        ('{"$":"later"}', "is of a newer version"),
        ('{"$":"tuple"}', "is not what elastic3d writes"),
        ("[" * 5000 + "]" * 5000, "is not what elastic3d writes"),
    ],
)
def test_forged_plain_values_run_nothing(tree: str, said: str) -> None:
    """Nothing is imported or called for them except what makes values."""
    with pytest.raises(Unloadable, match=said):
        objects.unwrap("object/data/x", tree.encode())


def test_cyclic_and_unsupported_values_are_refused() -> None:
    """The class is named, however deeply it is nested."""
    loop: list[Any] = []
    loop.append(loop)
    for value, said in (
        (loop, "contain themselves"),
        ({"a": [Own()]}, "test_dcp.Own"),
        (np.array([None]), "of object"),
        (np.ma.masked_array([1]), "MaskedArray"),
    ):
        with pytest.raises(ValueError, match=said):
            objects.wrap_plain("x", value)


def test_values_are_cast_on_request(tmp_path: Path) -> None:
    """As torch's own reader does; the error names the option."""
    dcp.save({"w": torch.rand(300), "n": torch.arange(3)}, storage_writer=Writer(tmp_path, step=1))
    wanted = {"w": torch.zeros(300).bfloat16(), "n": torch.zeros(3).double()}
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load(dict(wanted), storage_reader=Reader(tmp_path))
    assert "cast=True" in str(cause(raised))
    saved = {"w": torch.zeros(300), "n": torch.zeros(3).long()}
    dcp.load(saved, storage_reader=Reader(tmp_path))
    dcp.load(wanted, storage_reader=Reader(tmp_path, cast=True))
    same(wanted, {"w": saved["w"].bfloat16(), "n": saved["n"].double()})


def test_a_missing_store_is_a_load_error(tmp_path: Path) -> None:
    """Like any other of DCP's."""
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"w": torch.ones(1)}, storage_reader=Reader(tmp_path / "absent"))


def test_nothing_is_saved_beside_a_register(tmp_path: Path) -> None:
    """It would not see the checkpoint, and write over the ref; a Writer with the register is as good as any."""
    register = StoreRegister(open_store(str(tmp_path / "register")))
    store = open_store(str(tmp_path / "run"), register=register)
    for step in (1, 2):
        dcp.save({"x": torch.ones(2)}, storage_writer=Writer(store, step=step), no_dist=True)
    before = read_latest(open_store(str(tmp_path / "run")))
    with pytest.raises(dcp.CheckpointException, match="a register decides here"):
        dcp.save({"x": torch.ones(2)}, storage_writer=Writer(tmp_path / "run", step=3), no_dist=True)
    assert read_latest(open_store(str(tmp_path / "run"))) == before


def test_each_save_and_load_has_an_identity(tmp_path: Path) -> None:
    """A new one each time, as torch's own storage gives them."""
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    ids = {dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id=n).storage_meta.save_id for n in "123"}
    ids |= {(reader.reset(n), reader.read_metadata().storage_meta.load_id)[1] for n in "123"}
    assert len(ids) == 6
    assert None not in ids


def test_tensors_of_another_dtype_are_all_named(tmp_path: Path) -> None:
    """DCP would cast them silently."""
    dcp.save({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, storage_writer=Writer(str(tmp_path), step=1))
    wanted = {"a": torch.zeros(2).half(), "b": torch.zeros(3).double(), "c": torch.zeros(1)}
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load(wanted, storage_reader=Reader(str(tmp_path)))
    said = str(cause(raised))
    assert "2 tensors do not fit" in said
    assert "a: saved float32 [2], wanted torch.float16 [2]" in said
    assert "b: saved float32 [3], wanted torch.float64 [3]" in said
    assert torch.equal(wanted["c"], torch.zeros(1))


def test_a_damaged_tile_is_not_loaded(tmp_path: Path) -> None:
    """DCP's own reader would load a flipped bit; ours names the tensor."""
    dcp.save({"w": torch.ones(1000)}, storage_writer=Writer(str(tmp_path), step=1))
    (pack,) = (tmp_path / "packs").rglob("*.pack")
    data = bytearray(pack.read_bytes())
    data[2000] ^= 1
    pack.write_bytes(data)
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load({"w": torch.zeros(1000)}, storage_reader=Reader(str(tmp_path)))
    assert "w [0:1000]: no source has a good copy" in str(cause(raised))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"s": torch.eye(2).to_sparse()}, "s: planned as [2, 2], given as torch.sparse_coo torch.float32 [2, 2]"),
        ({"b": torch.empty(2, dtype=torch.bits8)}, "1 entries cannot be stored: b: torch.bits8 [2]"),
        ({"object/json/x": torch.ones(1)}, "object/json/x: a key kept for objects"),
    ],
)
def test_values_that_cannot_be_stored_are_named(state: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Nothing is dropped or cast to make a save succeed."""
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save(state, storage_writer=Writer(str(tmp_path), step=1))
    assert said in str(cause(raised))


def test_a_save_needs_a_step(tmp_path: Path) -> None:
    """Without one it is refused, and a path is no step."""
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer(str(tmp_path)))
    assert "no step was given" in str(cause(raised))
    with pytest.raises(ValueError, match="this writer takes the step"):
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer(str(tmp_path)), checkpoint_id="/some/where")


def test_one_writer_saves_many_steps_and_a_later_writer_may_go_back(tmp_path: Path) -> None:
    """A Writer keeps its generation; the next one, of a restarted job, owns a later history."""
    first = Writer(str(tmp_path))
    for step in (1, 2, 3):
        dcp.save({"w": torch.full((2,), float(step))}, storage_writer=first, checkpoint_id=str(step))
        assert first.committed is not None
        assert first.committed.ref.generation == 1
    dcp.save({"w": torch.zeros(2)}, storage_writer=Writer(str(tmp_path), step=2))
    checkpoint = open_checkpoint(open_store(str(tmp_path), write=False))
    assert (checkpoint.step, checkpoint.made_in) == (2, 2)
    third, made = Writer(str(tmp_path)), []
    for step in (5, 6, 5, 6):  # rolled back within the process
        dcp.save({"w": torch.zeros(2)}, storage_writer=third, checkpoint_id=str(step))
        checkpoint = open_checkpoint(open_store(str(tmp_path), write=False))
        made.append((checkpoint.step, checkpoint.made_in))
    assert made == [(5, 3), (6, 3), (5, 4), (6, 4)]
    loaded = {"w": torch.ones(2)}
    dcp.load(loaded, storage_reader=Reader(str(tmp_path)), checkpoint_id=first.committed.checkpoint)
    assert torch.equal(loaded["w"], torch.full((2,), 3.0))


def test_unchanged_tensors_are_written_once(tmp_path: Path) -> None:
    """A save refers to the tiles of the previous one, unless told not to."""
    frozen, writer = torch.rand(4096), Writer(str(tmp_path))
    sizes = []
    for step in (1, 2):
        dcp.save({"frozen": frozen, "step": torch.tensor(step)}, storage_writer=writer, checkpoint_id=str(step))
        sizes.append(sum(file.stat().st_size for file in (tmp_path / "packs").rglob("*.pack")))
    assert sizes[1] - sizes[0] < 2000
    dcp.save({"frozen": frozen + 1}, storage_writer=Writer(str(tmp_path), step=3, incremental=False))


def test_a_planner_may_cache_its_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged plan is not made again, and each save is whole."""
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached_")]:
        monkeypatch.setattr(SavePlanner, name, {})
    writer = Writer(str(tmp_path))
    for step in (1, 2, 3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"model": {"w": torch.full((2,), float(step))}, "step": step}
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), planner=planner)
        loaded = _load_state_dict_from_keys(storage_reader=Reader(str(tmp_path)))
        same(loaded, state)


def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """As `async_save` does with a process; the store is opened again there."""
    writer = Writer(str(tmp_path), facts={"run": "a"})
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, checkpoint_id="1")
    other = pickle.loads(pickle.dumps(writer))
    dcp.save({"w": torch.zeros(2)}, storage_writer=other, checkpoint_id="2")
    checkpoint = open_checkpoint(open_store(str(tmp_path), write=False))
    assert (checkpoint.step, checkpoint.made_in, checkpoint.facts) == (2, 1, {"run": "a"})


@pytest.mark.parametrize("codec", ["planes", "xor"])
def test_encoded_tiles_are_loaded_like_any_other(codec: str, tmp_path: Path) -> None:
    """Tiles that a save compressed, also against its parent, are restored bit for bit."""
    weights = torch.randn(50_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    writer = Writer(str(tmp_path), options=SaveOptions(codec=codec))
    for step in (1, 2):
        weights = weights * 1.001
        dcp.save({"w": weights}, storage_writer=writer, checkpoint_id=str(step))
    assert sum(file.stat().st_size for file in (tmp_path / "packs").rglob("*.pack")) < 2 * weights.nbytes
    loaded = {"w": torch.zeros_like(weights)}
    dcp.load(loaded, storage_reader=Reader(str(tmp_path)))
    same(loaded, {"w": weights})


AWKWARD = ("line\nbreak", "\0", "half a pair \ud800", "x" * 100_000, "named/" + "0" * 64, "tab\tin.a.path", "")


def test_names_of_any_text_are_restored(tmp_path: Path) -> None:
    """Unprintable, very long or not even Unicode, for tensors, tied ones too, and objects."""
    tied = torch.rand(3)
    state: dict[str, Any] = {"plain": {name: torch.full((2,), float(i)) for i, name in enumerate(AWKWARD)}}
    state |= {"again\n": tied, "tied": tied, "count\r": 3, "date\v": datetime.date(2026, 1, 2)}
    dcp.save(state, storage_writer=Writer(str(tmp_path), step=1))
    loaded = _load_state_dict_from_keys(storage_reader=Reader(str(tmp_path)))
    same(loaded, state)
    asked = {"plain": {name: torch.zeros(2) for name in AWKWARD}, "count\r": None, "again\n": torch.zeros(3)}
    dcp.load(asked, storage_reader=Reader(str(tmp_path)))
    same(asked, {name: state[name] for name in asked})
    export_checkpoint("torch", open_checkpoint(open_store(str(tmp_path), write=False)), tmp_path / "out.pt")
    same(torch.load(tmp_path / "out.pt", weights_only=False), state)
    with pytest.raises(NotExportable, match=r"names in UTF-8.*half a pair \\ud800"):
        export_checkpoint(
            "safetensors", open_checkpoint(open_store(str(tmp_path), write=False)), tmp_path / "out.safetensors"
        )


class Wrapped(torch.Tensor):
    """A tensor made of others, like quantised ones."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].inner)
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(f"{func} of what is not there")


def test_a_tensor_without_bytes_of_its_own_is_refused(tmp_path: Path) -> None:
    """At the save, naming its class and what to do."""
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save({"w": Wrapped(torch.ones(2))}, storage_writer=Writer(str(tmp_path), step=1))
    assert "w: a tests.checkpointing.interchange.test_dcp.Wrapped has no bytes of its own" in str(cause(raised))
    assert "dequantize()" in str(cause(raised))
