"""What made a state is part of it: the generations after it know, and refuse a configuration that changed silently."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from elastic3d.errors import ConfigurationError, StateUnfit
from elastic3d.provenance import record
from elastic3d.provenance.code import CodeState
from elastic3d.provenance.record import Provenance, ScriptOrigin
from elastic3d.training import identity, state_facts
from tests.training.lives import live
from tests.training.test_changed import Texts, train


def leave(folder: Path, config: Any, take: Path | None = None, accept: Any = ()) -> Path:
    """Train some steps with a configuration and leave; return the folder of the state."""
    folder.mkdir()
    origin = ScriptOrigin(config=config)
    live(lambda run: train(run, Texts(5), steps=99, accept=accept), keep=folder, take=take, leave_at=2, origin=origin)
    return folder


def go_on(state: Path, config: Any, accept: Any = ()) -> Any:
    origin = ScriptOrigin(config=config)
    run, _, _ = live(lambda run: train(run, Texts(5), steps=6, accept=accept), take=state, origin=origin)
    return run


def kept(state: Path) -> Provenance:
    """Return what the newest state in a folder says of itself."""
    newest = max(state.iterdir(), key=lambda file: int(file.name.split(".")[0]))
    found = record.of_facts(pickle.loads(newest.read_bytes())[0])
    assert found is not None
    return found


def test_a_state_says_what_made_it(tmp_path: Path) -> None:
    """Its configuration and that one's version, the code and the packages, as they are found in this process."""
    made = kept(leave(tmp_path / "state", {"lr": 0.5, "model": {"width": 8}}))
    assert (made.config, made.earlier) == ({"lr": 0.5, "model": {"width": 8}}, ())
    assert made.config_version == ScriptOrigin(config={"model": {"width": 8}, "lr": 0.5}).version
    assert {"python", "torch", "elastic3d", "numpy"} <= made.packages.keys()
    assert made.code.script or made.code.without


def test_a_configuration_that_changed_silently_is_refused(tmp_path: Path) -> None:
    """The keys are named with both values; to drop the configuration is a change too."""
    state = leave(tmp_path / "state", {"lr": 0.5, "model": {"width": 8}, "name": "a"})
    wanted = (
        r"the state of step 2 was made with another configuration: config: lr was 0.5 and is 0.25; model.depth was not "
        r'there and is 2; name was "a" and is not there from here on.*run.restore\(..., accept="config"\)'
    )
    with pytest.raises(StateUnfit, match=wanted):
        go_on(state, {"lr": 0.25, "model": {"width": 8, "depth": 2}})
    with pytest.raises(StateUnfit, match="is not given from here on"):
        go_on(state, None, accept="data")
    assert go_on(state, {"name": "a", "model": {"width": 8}, "lr": 0.5}).steps == 6


def test_an_accepted_change_goes_into_the_ledger(tmp_path: Path) -> None:
    """Of the step from which on it holds; the generations after it go on with the new one, and have what was before."""
    state = leave(tmp_path / "state", {"lr": 0.5})
    after = leave(tmp_path / "after", {"lr": 0.25}, take=state, accept={"config"})
    assert kept(after).config == {"lr": 0.25}
    [then] = kept(after).earlier
    assert (then.generation, then.step, then.config) == (1, 2, kept(state).config_version)
    run = go_on(after, {"lr": 0.25})
    assert [line.changed for line in run.ledger] == ["", "config: lr was 0.5 and is 0.25 from here on", ""]
    with pytest.raises(StateUnfit, match=r"lr was 0\.25 and is 0\.5"):
        go_on(after, {"lr": 0.5})


def test_a_state_without_a_configuration_takes_any(tmp_path: Path) -> None:
    """Those of older versions do not say, nor does one of a script that gave none; nor is a script without one new."""
    assert go_on(leave(tmp_path / "none", None), {"lr": 0.5}).steps == 6
    old = leave(tmp_path / "old", {"lr": 0.5})
    for file in old.iterdir():
        facts, tiles = pickle.loads(file.read_bytes())
        del facts["provenance"]
        file.write_bytes(pickle.dumps((facts, tiles)))
    assert go_on(old, {"lr": 0.25}).steps == 6


def test_a_provenance_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """As all else in the facts is: clearly, and before anything is loaded."""
    state = leave(tmp_path / "state", {"lr": 0.5})
    wrongs: tuple[Any, ...] = ("{", "[]", '{"code": 3, "packages": {}}', 3, {"code": {}})
    for wrong in wrongs:
        for file in state.iterdir():
            facts, tiles = pickle.loads(file.read_bytes())
            file.write_bytes(pickle.dumps(({**facts, "provenance": wrong}, tiles)))
        with pytest.raises(StateUnfit, match="cannot be read"):
            go_on(state, {"lr": 0.5})


def test_a_checkpoint_has_it_as_an_object(tmp_path: Path) -> None:
    """A snapshot has it as one text, so that no step pays for it; both are read alike."""
    state = leave(tmp_path / "state", {"lr": 0.5, "deep": [{"a": None}]})
    facts = pickle.loads(max(state.iterdir()).read_bytes())[0]
    assert isinstance(facts["provenance"], str)
    written = json.loads(json.dumps(record.spelled_out(facts)))
    assert written["provenance"]["config"] == {"lr": 0.5, "deep": [{"a": None}]}
    assert record.spelled_out({"step": 1}) == {"step": 1}
    assert state_facts.parse(written, 2) == state_facts.parse(facts, 2)
    assert record.of_facts(written) == record.of_facts(facts)


def test_another_configuration_on_another_node_is_refused() -> None:
    """Rank 0's is that of all states; a node whose script has another one must not train."""
    now = Provenance(config={"a": 1}, config_version=ScriptOrigin(config={"a": 1}).version, code=CODE, packages={})
    identity.check_same_config(now.config_version, now, "n")
    identity.check_same_config(None, now, "n")
    for mine in ("", ScriptOrigin(config={"a": 2}).version):
        with pytest.raises(ConfigurationError, match=r"node n: elastic3d.run\(config=...\) is another one here"):
            identity.check_same_config(mine, now, "n")


CODE = CodeState(script="train.py")
