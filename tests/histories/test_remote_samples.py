"""Real jobs whose samples are in an object store that loses answers, is busy, or stands still."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.history.follow import Picture
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.scripts.train_gpt import SourceFiles
from chaos.servers.etcd import EtcdServer
from chaos.servers.proxied_store import proxied_store
from chaos.servers.s3_proxy import ALWAYS, Do, Harm, S3Proxy
from elastic3d.cli import application
from elastic3d.data import Batches
from elastic3d.values import Layout
from tests.histories.conftest import Quiet
from tests.histories.scripts import remote_samples
from tests.histories.test_histories import SMALL, faults, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.s3, pytest.mark.timeout(420)]

SCRIPT = Path(remote_samples.__file__)
REMOTE = replace(SMALL, script=SCRIPT)
PAIR = replace(REMOTE, nodes=2, layout=Layout(pp=1, dp=2))
OBJECTS = "/parts/"
"""In the path of each request for samples."""
LATE = 20.0
"""Seconds for which a source may give nothing: two thirds of what a loader is given."""


class Source:
    """The objects behind a proxy. A request that is held waits until `release`."""

    def __init__(self, url: str, proxy: S3Proxy) -> None:
        self.url, self.proxy = url, proxy
        self.free = threading.Event()
        proxy.sleep = self._wait

    def hold(self, path: str, *, seconds: float = 600.0, times: int = ALWAYS) -> None:
        """Answer requests whose path has this in it so much later."""
        self.proxy.harms.append(Harm(do=Do.DELAY, method="GET", path=path, seconds=seconds, times=times))

    def release(self) -> None:
        """Answer all requests."""
        self.proxy.harms.clear()
        self.free.set()

    def _wait(self, seconds: float) -> None:
        self.free.wait(seconds)


@pytest.fixture(scope="module")
def objects() -> Iterator[tuple[str, S3Proxy]]:
    """Objects with the samples of the demo's text, and the proxy before them."""
    with proxied_store() as (url, proxy):
        remote_samples.put(f"{url}/text", SourceFiles(SMALL.context))
        yield f"{url}/text", proxy


@pytest.fixture
def source(objects: tuple[str, S3Proxy], monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """The same, undisturbed, for the jobs of one test."""
    monkeypatch.setenv(remote_samples.DATA, objects[0])
    monkeypatch.setenv(remote_samples.AHEAD, "32")
    monkeypatch.setenv(remote_samples.WORKERS, "0")
    source = Source(*objects)
    yield source
    source.release()


def objects_of_one_sample(setting: Setting) -> Iterator[tuple[int, str]]:
    """Yield steps, counted from 1, and an object of which they need a sample and which no other step needs any of."""
    data = SourceFiles(setting.context)
    batches = Batches(data, global_batch=setting.global_batch, micro_batch=setting.micro_batch, seed=setting.seed)
    size = setting.global_batch
    needed = [remote_samples.object_of(int(number)) for number in batches.order.samples(0, setting.steps * size)]
    for at, name in enumerate(needed):
        if Counter(needed)[name] == 1:
            yield at // size + 1, name


def explained(events: Path) -> str:
    """Return what `elastic3d explain` says of a run, without its line breaks."""
    return " ".join(CliRunner().invoke(application(), ["explain", "--events", str(events)]).output.split())


def with_its_bits(outcome: Outcome, quiet: Quiet) -> Outcome:
    """Assert that a job kept all promises, and has the bits of a job on the same text from this machine's disk."""
    return held(outcome, quiet(replace(SMALL, nodes=outcome.setting.nodes, layout=outcome.setting.layout)))


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_lost_node_costs_no_bit_of_samples_in_an_object_store(
    workers: int, source: Source, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do answers that get lost, and a server that is busy; the bits are those of the same samples from a disk."""
    monkeypatch.setenv(remote_samples.WORKERS, str(workers))
    source.proxy.harms += [
        Harm(do=do, path=OBJECTS, skip=20 + 7 * place, times=2)
        for place, do in enumerate((Do.BUSY, Do.REFUSE, Do.TRUNCATE))
    ]
    outcome = with_its_bits(play(REMOTE, faults("1@8"), etcd=job_etcd, workdir=tmp_path), quiet)
    assert [view.cause for view in outcome.picture.generations] == ["start", "death"]
    assert {done.do for done in source.proxy.done} == {Do.BUSY, Do.REFUSE, Do.TRUNCATE}
    read = [event.fields["read"] for event in outcome.events if event.name == "step.committed"]
    assert any(read)
    assert all(nbytes % (SMALL.context + 1) == 0 for nbytes in read)


@pytest.mark.slow
def test_an_object_that_does_not_come_is_named_and_one_that_comes_late_is_not(
    source: Source, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rank's own node, by the leader and by `explain`; and fresh trainers that get it go on with the bits."""
    # Fetched within the step before, so that a step waits for about as long as the answer takes.
    monkeypatch.setenv(remote_samples.AHEAD, "4")
    places = dict(objects_of_one_sample(PAIR))
    late = next(places[step] for step in sorted(places) if step >= 8)
    never = next(places[step] for step in sorted(places) if step >= 16)
    source.hold(late, seconds=LATE)
    source.hold(never)
    steps: list[int] = []

    def watch(picture: Picture) -> None:
        if picture.said("rank.stuck"):
            steps.append(picture.step)
            source.release()

    outcome = with_its_bits(play(PAIR, etcd=job_etcd, workdir=tmp_path, watch=watch), quiet)
    first, second = outcome.picture.generations
    assert (first.cause, second.cause) == ("start", "stuck")
    assert steps[0] >= 14
    assert max(step.seconds for step in outcome.picture.steps) > LATE / 2
    waits = f"waits for {source.url}/{never} bytes "
    (suspected,) = (event for event in outcome.events if event.name == "rank.suspected")
    assert waits in suspected.fields["detail"]
    (stuck,) = (event for event in outcome.events if event.name == "rank.stuck")
    assert stuck.fields["fault"] == "data loader"
    assert stuck.fields["ranks"] == [suspected.rank]
    assert waits in stuck.fields["detail"]
    assert waits in explained(tmp_path / "events")


@pytest.mark.slow
def test_a_store_that_stands_still_is_named_and_no_node_is_blamed(
    source: Source, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """All ranks wait for it; the same trainers go on once it answers."""

    def watch(picture: Picture) -> None:
        if picture.said("training.stalled"):
            source.release()
        elif picture.step >= 6 and not source.proxy.harms and not source.free.is_set():
            source.hold(OBJECTS)

    outcome = with_its_bits(play(PAIR, etcd=job_etcd, workdir=tmp_path, watch=watch), quiet)
    assert [view.cause for view in outcome.picture.generations] == ["start"]
    assert not outcome.picture.said("rank.stuck")
    (stalled,) = (event for event in outcome.events if event.name == "training.stalled")
    assert "2 of 2 ranks stand at data: look at where the data is read from (they wait for" in stalled.fields["detail"]
    assert f"{source.url}{OBJECTS}" in stalled.fields["detail"]
    assert source.url in explained(tmp_path / "events")
