"""`elastic3d islands`: what it shows of the records between islands, and who is given up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpointing.stores.opening import open_store
from elastic3d.cli import application
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.record import SentDelta, Setup, first, following

run = CliRunner()

SETUP = Setup(
    model="m", parameters=1, initial="i", seed=1, data_seed=2, data="", samples=9, global_batch=4, micro_batch=2,
    leaf=1, precision="fp32", optimizer="AdamW", every=10, fragments=1, outer="nesterov", lr=0.7, momentum=0.9,
)  # fmt: skip


@pytest.fixture
def between(tmp_path: Path) -> Path:
    """A store with an outer step of two islands, one of which was lost, and with a third that asks to join."""
    exchange = Exchange(open_store(str(tmp_path / "between")))
    exchange.setup(SETUP)
    for island in ("east.1", "west.1"):
        assert exchange.join(island, "token")
    before = exchange.seal(first(["east.1", "west.1"], [], by="east.1"))
    sent = {"west.1": SentDelta(island="west.1", folder="f", checkpoint="c", root="r")}
    exchange.seal(following(before, sent, joined=["east.1", "west.1"], left=[], by="west.1"))
    assert exchange.join("north.1", "token")
    return tmp_path / "between"


def islands(*arguments: str, code: int = 0) -> str:
    result = run.invoke(application(), ["islands", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_show_says_who_was_merged_and_what_became_of_the_samples(between: Path) -> None:
    """One round of ten steps of four samples was merged; that of the lost island is trained again by the other."""
    shown = islands("show", str(between))
    assert "40 samples merged once, 40 under way, 0 of lost islands" in shown
    assert "training: west.1; asking: north.1" in shown
    document = json.loads(islands("show", str(between), "--json"))
    assert document["records"][1]["lost"] == ["east.1"]
    assert document["whole"] is True


def test_leave_gives_an_island_up(between: Path) -> None:
    """One that asked to join is asking no longer; a name that nobody has is refused with those that are there."""
    islands("leave", str(between), "north.1")
    assert json.loads(islands("show", str(between), "--json"))["left"] == ["north.1"]
    assert "there are: east.1, north.1, west.1" in islands("leave", str(between), "south.1", code=2)


def test_a_store_without_islands_says_so(tmp_path: Path) -> None:
    """Nothing is made there."""
    (tmp_path / "empty").mkdir()
    assert "no island has begun here" in " ".join(islands("show", str(tmp_path / "empty")).split())
