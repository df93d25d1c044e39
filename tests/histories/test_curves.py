"""The curves of a job of real processes: one point for each step, whatever nodes die."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from chaos.faults.moment import When
from chaos.faults.process import Pause
from chaos.machine.processes import Part
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.servers.etcd import EtcdServer
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, SMALL, faults, held
from tests.trackers.test_event_files import shown
from tests.trackers.test_mlflow_runs import history

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

STEPS = list(range(1, SMALL.steps + 1))


@pytest.mark.long
def test_curves_are_whole_when_the_node_that_writes_them_is_killed(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """Each step once and with the losses of the undisturbed run, in each of the files.

    The first node writes, and is killed; another one joins in its place, which has not heard the steps before.
    """
    curves = tmp_path / "curves"
    kinds = (f"csv:{curves}/losses.csv", f"jsonl:{curves}/losses.jsonl", f"tensorboard:{curves}/board")
    setting = dataclasses.replace(SMALL, options=(*SMALL.options, *(f"--tracker={kind}" for kind in kinds)))
    outcome = held(play(setting, faults("stage0@8", "@8"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL))
    assert len(outcome.picture.generations) > 1
    losses = losses_of(quiet(SMALL))
    assert written(curves / "losses.csv") == [(step, losses[step]) for step in STEPS]
    lines = [json.loads(line) for line in (curves / "losses.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(step, losses[step]) for step in STEPS]
    assert shown(curves / "board") == pytest.approx(losses)
    opened = [event for event in outcome.events if event.name == "tracker.opened"]
    assert len({event.node for event in opened}) > 1
    assert {event.name for event in outcome.events if event.name.startswith("tracker.")} == {"tracker.opened"}


@pytest.mark.slow
def test_curves_are_whole_when_the_node_that_writes_them_stands_still_and_goes_on(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back with its points in hand, as another node; none is doubled, in files and in the services' clients.

    A tracker that takes nothing costs the time that its end waits, and is named.
    """
    curves = tmp_path / "curves"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(curves))
    curves.mkdir()
    uri = (curves / "mlruns").as_uri()
    kinds = (
        f"csv:{curves}/a.csv",
        f"tensorboard:{curves}/board",
        f"mlflow:gpt@{uri}",
        "wandb:gpt",
        "csv:/proc/no/a.csv",
    )
    setting = dataclasses.replace(LONG, options=(*LONG.options, *(f"--tracker={kind}" for kind in kinds)))
    asked = [Pause(node="stage0", part=Part.KEEPERS, seconds=6.0, when=When(step=8))]
    outcome = held(play(setting, asked, etcd=job_etcd, workdir=tmp_path / "job"), quiet(LONG))
    assert len(outcome.picture.generations) > 1
    losses = losses_of(quiet(LONG))
    assert written(curves / "a.csv") == sorted(losses.items())
    assert shown(curves / "board") == pytest.approx(losses)
    assert history(uri) == sorted(losses.items())
    assert len({event.node for event in outcome.events if event.name == "tracker.opened"}) > 1
    assert {event.fields["tracker"] for event in outcome.events if event.name == "tracker.unwritten"} == {kinds[-1]}
    failed = [event for event in outcome.events if event.name == "tracker.failed"]
    assert {event.fields["tracker"] for event in failed} >= {kinds[-1]}
    (former,) = {done.node for done in outcome.injections}
    # Who wrote before wakes up, finds that another one writes now, and says so.
    taken = [event for event in failed if event.fields["tracker"] != kinds[-1]]
    assert all(event.node == former and "another process" in event.fields["error"] for event in taken)


def written(path: Path) -> list[tuple[int, float]]:
    """Return the points of a CSV file, in their order."""
    with open(path) as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def losses_of(outcome: Outcome) -> dict[int, float]:
    """Return the loss of each step."""
    committed = [event for event in outcome.events if event.name == "step.committed"]
    return {event.fields["step"]: float.fromhex(event.fields["loss"]) for event in committed}
