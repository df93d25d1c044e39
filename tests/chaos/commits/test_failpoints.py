"""Real processes, killed with SIGKILL at every named failpoint of a save and a commit, on a local disk and on S3."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chaos.failpoints.nursery import Nursery
from chaos.failpoints.run import LEADER, OF_LEADERS, OF_RANKS, Trial, draw, play
from chaos.failpoints.store import FailingStore, Failpoint, When, parse_failpoint
from chaos.servers.s3 import S3Server
from checkpointing import open_store

TRIALS = [
    *(Trial(failpoints={f"rank{number % 2}": point}) for number, point in enumerate(OF_RANKS)),
    *(Trial(failpoints={LEADER: point}) for point in OF_LEADERS),
]


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_a_checkpoint_survives_a_kill_on_a_local_disk(trial: Trial, crew: Nursery, tmp_path: Path) -> None:
    """The latest checkpoint is whole, the next leader commits or ranks save again.

    The bits equal an undisturbed run's.
    """
    result = play(trial, crew, str(tmp_path / "store"))
    assert result.problems == ()
    assert result.killed == 1


@pytest.mark.long
@pytest.mark.s3
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_a_checkpoint_survives_a_kill_on_s3(trial: Trial, crew: Nursery, server: S3Server) -> None:
    """The same against a real S3 server."""
    trial = dataclasses.replace(trial, world=2)
    name = str(trial).replace("@", "-").replace(":", "-")
    result = play(trial, crew, server.url(name), server.options, everybody=False)
    assert result.problems == ()
    assert result.killed == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_checkpoints_survive_many_kills_on_a_local_disk(crew: Nursery, tmp_path: Path) -> None:
    """200 random trials with up to three kills each, at any operation."""
    killed = 0
    for seed in range(1, 201):
        result = play(draw(seed), crew, str(tmp_path / str(seed)))
        assert result.problems == (), f"seed {seed}: {draw(seed)}"
        killed += result.killed
    assert killed > 100


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_checkpoints_survive_many_kills_on_s3(crew: Nursery, server: S3Server) -> None:
    """The same against a real S3 server."""
    killed = 0
    for seed in range(1, 201):
        result = play(draw(seed), crew, server.url(f"random-{seed}"), server.options)
        assert result.problems == (), f"seed {seed}: {draw(seed)}"
        killed += result.killed
    assert killed > 100


def test_a_failpoint_fires_at_its_count() -> None:
    """Operations are counted by name; DURING passes on half of the bytes first."""
    plain = open_store("memory://failpoints", write=False)
    reached: list[str] = []

    def failing(text: str) -> FailingStore:
        return FailingStore(plain, parse_failpoint(text), lambda: reached.append(text))

    store = failing("after:create-manifest:2")
    store.put_if_absent("saves/1", b"a")
    store.put_if_absent("checkpoints/1", b"a")
    assert reached == []
    store.put_if_absent("saves/2", b"a")
    assert reached == ["after:create-manifest:2"]
    assert plain.get("saves/2") == b"a"
    failing("during:put-pack:1").put("packs/1", [b"abc", b"defg"])
    assert reached[1:] == ["during:put-pack:1"]
    assert plain.get("packs/1") == b"abcdefg"
    assert str(Failpoint(when=When.BEFORE, operation="any", count=3)) == "before:any:3"
