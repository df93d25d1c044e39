"""The curves of a job of real processes: one point for each step, whatever nodes die."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from chaos.playing.play import Outcome, play
from chaos.servers.etcd import EtcdServer
from tests.histories.conftest import Quiet
from tests.histories.test_histories import SMALL, faults, held
from tests.trackers.test_event_files import shown

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]


def test_curves_are_whole_when_the_node_that_writes_them_is_killed(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """Each step once and with the losses of the undisturbed run, in each of the files.

    The first node writes, and is killed; another one joins in its place, which has not heard the steps before.
    """
    curves = tmp_path / "curves"
    kinds = (f"csv:{curves}/losses.csv", f"jsonl:{curves}/losses.jsonl", f"tensorboard:{curves}/board")
    setting = dataclasses.replace(SMALL, options=(*SMALL.options, *(f"--tracker={kind}" for kind in kinds)))
    outcome = held(play(setting, faults("0@8", "@8"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL))
    assert len(outcome.picture.generations) > 1
    losses = losses_of(quiet(SMALL))
    steps = list(range(1, SMALL.steps + 1))
    with open(curves / "losses.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == steps
    assert [float(row["loss"]) for row in rows] == [losses[step] for step in steps]
    lines = [json.loads(line) for line in (curves / "losses.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(step, losses[step]) for step in steps]
    assert shown(curves / "board") == pytest.approx(losses)
    opened = [event for event in outcome.events if event.name == "tracker.opened"]
    assert len({event.node for event in opened}) > 1
    assert {event.name for event in outcome.events if event.name.startswith("tracker.")} == {"tracker.opened"}


def losses_of(outcome: Outcome) -> dict[int, float]:
    """Return the loss of each step."""
    committed = [event for event in outcome.events if event.name == "step.committed"]
    return {event.fields["step"]: float.fromhex(event.fields["loss"]) for event in committed}
