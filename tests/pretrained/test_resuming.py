"""A run that goes on has its own state: it does not read weights again, and knows which it began with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from elastic3d.errors import StateUnfit
from tests.parallel.architectures.families import llama
from tests.parallel.architectures.weights_mains import saved
from tests.pretrained.beginning import begin, values


def test_a_resume_does_not_read_the_weights_again(tmp_path: Path) -> None:
    """They may be gone; the states that it goes on to make still know them."""
    saved(llama, tmp_path / "llama")
    host, _ = begin(llama, tmp_path / "llama", steps=1, store=tmp_path / "store")
    kept = host.facts[-1]["weights"]
    assert kept["named"] == str(tmp_path / "llama")
    shutil.rmtree(tmp_path / "llama")
    again, _ = begin(llama, tmp_path / "llama", steps=2, store=tmp_path / "store")
    assert (again.began[0].source, again.began[0].step) == ("store", 1)
    assert again.facts[-1]["weights"] == kept
    without, _ = begin(llama, None, steps=3, store=tmp_path / "store")
    assert without.facts[-1]["weights"] == kept


def test_the_same_weights_elsewhere_are_the_same(tmp_path: Path) -> None:
    """Their fingerprint does not depend on where they lie."""
    saved(llama, tmp_path / "one")
    begin(llama, tmp_path / "one", steps=1, store=tmp_path / "store")
    shutil.move(tmp_path / "one", tmp_path / "two")
    host, _ = begin(llama, tmp_path / "two", steps=2, store=tmp_path / "store")
    assert host.began[0].detail == ""


def test_other_weights_are_refused_unless_the_script_takes_the_state_all_the_same(tmp_path: Path) -> None:
    """They would be ignored; where they are accepted, the ledger says so."""
    model = saved(llama, tmp_path / "one")
    with torch.no_grad():
        next(model.parameters()).add_(1)
    model.save_pretrained(tmp_path / "two")  # type: ignore[operator]
    begin(llama, tmp_path / "one", steps=1, store=tmp_path / "store")
    with pytest.raises(StateUnfit, match=r"run began with .*one .* and weights='.*two' are others.*accept=\"weights\""):
        begin(llama, tmp_path / "two", steps=2, store=tmp_path / "store")
    with pytest.raises(StateUnfit, match=r"not known whether .*three is the same"):
        begin(llama, tmp_path / "three", steps=2, store=tmp_path / "store")
    host, _ = begin(llama, tmp_path / "two", steps=2, store=tmp_path / "store", accept="weights")
    assert "they are not read" in host.began[0].detail
    assert "two" in host.facts[-1]["ledger"][-1]["changed"]


def test_weights_named_for_a_run_that_began_without_are_refused(tmp_path: Path) -> None:
    """Whoever adds them expects them to be read."""
    saved(llama, tmp_path / "one")
    begin(llama, None, steps=1, store=tmp_path / "store")
    with pytest.raises(StateUnfit, match=r"the run began with what its seed gave"):
        begin(llama, tmp_path / "one", steps=2, store=tmp_path / "store")


def test_the_state_of_a_run_is_weights_for_another(tmp_path: Path) -> None:
    """By `URL@checkpoint`, without its optimizer: another run begins at step 0 with the model of a step."""
    _, model = begin(llama, None, steps=2, store=tmp_path / "store")
    after = values(model)
    host, other = begin(llama, f"{tmp_path / 'store'}@latest", store=tmp_path / "other")
    assert host.began[0].step == 0
    assert all(torch.equal(value, after[name]) for name, value in values(other).items())
