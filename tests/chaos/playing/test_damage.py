"""What a job says that it has committed has to be in its store, where `latest` names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.history.follow import Picture, Step
from chaos.playing.play import Player
from chaos.playing.setting import Setting
from chaos.servers.etcd import EtcdServer
from checkpointing import open_store
from elastic3d.clock import SYSTEM
from tests.checkpointing.states import make_state, save_and_commit

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(60)]

LATEST = "refs/latest"


def seen(step: int, *checkpoints: int) -> Picture:
    """Return the picture of a job that has made so many steps."""
    last = Step(number=step, generation=1, at=0.0, loss="", seconds=0.1, samples=(0, 1), sample_sum=0)
    return Picture(steps=(last,), checkpoints=checkpoints)


@pytest.mark.parametrize(
    ("kept", "picture", "wrong"),
    [
        pytest.param((5, 8), seen(8, 5, 8), (), id="the last step's"),
        pytest.param((5,), seen(8, 5), (), id="an earlier one, and no other was committed"),
        pytest.param((), seen(8, 5, 8), ("latest names no checkpoint",), id="nothing is there"),
        pytest.param(
            (5,),
            seen(8, 5, 8),
            ("latest names the checkpoint of step 5, and not that of step 8",),
            id="an earlier one, though the last step's was committed",
        ),
    ],
)
def test_latest_names_what_was_committed(
    kept: tuple[int, ...], picture: Picture, wrong: tuple[str, ...], tmp_path: Path
) -> None:
    """A store in which nothing is wrong may still not have what nodes say."""
    with EtcdServer() as etcd:
        job = Player(Setting(nodes=1), (), etcd, tmp_path / "job", "damage", None, SYSTEM)
    store = open_store(job.store)
    for step in kept:
        save_and_commit(store, make_state({"w": ("float32", (4,))}), step=step)
    job.picture = picture
    assert job.damage() == wrong


@pytest.mark.parametrize("text", [None, b"{"], ids=["gone", "damaged"])
def test_a_latest_that_cannot_be_read_is_damage(text: bytes | None, tmp_path: Path) -> None:
    """Checkpoints that are whole are of no use to who cannot find them."""
    with EtcdServer() as etcd:
        job = Player(Setting(nodes=1), (), etcd, tmp_path / "job", "damage", None, SYSTEM)
    store = open_store(job.store)
    save_and_commit(store, make_state({"w": ("float32", (4,))}), step=8)
    file = Path(job.store_folder) / LATEST
    file.unlink()
    if text is not None:
        file.write_bytes(text)
    job.picture = seen(8, 8)
    assert len(job.damage()) == 1
