"""Writer and Reader in one process: what they refuse, and how they say it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from checkpointing import open_checkpoint, open_store
from checkpointing.interchange import Reader, Writer
from checkpointing.saving.options import SaveOptions
from tests.interchange.samples import every_dtype, same


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
    """Return what one rank raised inside DCP."""
    (failure,) = raised.value.failures.values()
    return failure[0]


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    """All dtypes, a scalar, an empty tensor, a transposed target: the bytes are those that were saved."""
    state = {**every_dtype(), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.rand(5, 3).t()}
    dcp.save(state, storage_writer=Writer(str(tmp_path), step=1))
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    assert not loaded["turned"].is_contiguous()
    dcp.load(loaded, storage_reader=Reader(str(tmp_path)))
    same(loaded, state)
    same(_load_state_dict_from_keys(storage_reader=Reader(str(tmp_path))), state)


def test_objects_are_json_where_json_has_them(tmp_path: Path) -> None:
    """Plain values are stored as JSON, what JSON would change as torch's pickle; both come back as they were."""
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


def test_a_pickle_that_is_not_plain_data_is_saved_but_never_loaded(tmp_path: Path) -> None:
    """Saving warns; loading says what to do and runs nothing; allowing the class loads it; all else is loadable."""
    with pytest.warns(UserWarning, match="add_safe_globals: mine"):
        dcp.save({"mine": Own(), "w": torch.ones(2)}, storage_writer=Writer(str(tmp_path), step=1))
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
def test_what_cannot_be_stored_is_named(state: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Nothing is dropped or cast to make a save succeed."""
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save(state, storage_writer=Writer(str(tmp_path), step=1))
    assert said in str(cause(raised))


def test_steps_are_asked_for(tmp_path: Path) -> None:
    """Without a step there is no save, and a path is no step."""
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer(str(tmp_path)))
    assert "no step was given" in str(cause(raised))
    with pytest.raises(ValueError, match="this writer takes the step"):
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer(str(tmp_path)), checkpoint_id="/some/where")


def test_one_writer_saves_many_steps_and_a_later_one_may_go_back(tmp_path: Path) -> None:
    """A Writer keeps its generation; the next one, of a job that was started again, owns a later history."""
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
    """A save refers to the tiles of the one before, unless it is told not to."""
    frozen, writer = torch.rand(4096), Writer(str(tmp_path))
    sizes = []
    for step in (1, 2):
        dcp.save({"frozen": frozen, "step": torch.tensor(step)}, storage_writer=writer, checkpoint_id=str(step))
        sizes.append(sum(file.stat().st_size for file in (tmp_path / "packs").rglob("*.pack")))
    assert sizes[1] - sizes[0] < 2000
    dcp.save({"frozen": frozen + 1}, storage_writer=Writer(str(tmp_path), step=3, incremental=False))


def test_a_planner_that_caches_its_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that does not change is not planned again, and each save is whole."""
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached_")]:
        monkeypatch.setattr(SavePlanner, name, {})
    writer = Writer(str(tmp_path))
    for step in (1, 2, 3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"model": {"w": torch.full((2,), float(step))}, "step": step}
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), planner=planner)
        loaded = _load_state_dict_from_keys(storage_reader=Reader(str(tmp_path)))
        same(loaded, state)


def test_a_writer_travels_to_another_process(tmp_path: Path) -> None:
    """As `async_save` in a process sends it; the store is opened anew there."""
    writer = Writer(str(tmp_path), facts={"run": "a"})
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, checkpoint_id="1")
    other = pickle.loads(pickle.dumps(writer))
    dcp.save({"w": torch.zeros(2)}, storage_writer=other, checkpoint_id="2")
    checkpoint = open_checkpoint(open_store(str(tmp_path), write=False))
    assert (checkpoint.step, checkpoint.made_in, checkpoint.facts) == (2, 1, {"run": "a"})


@pytest.mark.parametrize("codec", ["planes", "xor"])
def test_encoded_tiles_are_loaded_like_any_other(codec: str, tmp_path: Path) -> None:
    """What a save may compress, against its parent too, comes back bit for bit."""
    weights = torch.randn(50_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    writer = Writer(str(tmp_path), options=SaveOptions(codec=codec))
    for step in (1, 2):
        weights = weights * 1.001
        dcp.save({"w": weights}, storage_writer=writer, checkpoint_id=str(step))
    assert sum(file.stat().st_size for file in (tmp_path / "packs").rglob("*.pack")) < 2 * weights.nbytes
    loaded = {"w": torch.zeros_like(weights)}
    dcp.load(loaded, storage_reader=Reader(str(tmp_path)))
    same(loaded, {"w": weights})
