"""Faults ordered of a live job by `elastic3d chaos inject`, as a person would: with the job's etcd and nothing else."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from chaos.history.follow import Picture
from chaos.judging.oracle import compare
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.servers.etcd import EtcdServer
from elastic3d import etcd_keys as keys
from elastic3d.cli import application
from elastic3d.etcd import EtcdClient, Put
from elastic3d.membership.injection import ordered
from elastic3d.membership.inspection.jobs import job as job_of
from elastic3d.membership.inspection.jobs import jobs, read_status
from elastic3d.membership.records import encode
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, held
from tests.histories.test_saving import events

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

CLOSED = dataclasses.replace(LONG, nodes=2, steps=30)
OPEN = dataclasses.replace(CLOSED, conf={"chaos": "allow"})
THREE = dataclasses.replace(OPEN, nodes=3)


class Operator:
    """Somebody who knows where etcd is, and orders a fault of a node once the job has made some steps.

    past: write the order though the command refuses it.
    """

    def __init__(self, etcd: EtcdServer, *arguments: str, node: str, past: bool = False) -> None:
        self._etcd, self._arguments, self._node, self._past = etcd, arguments, node, past
        self._app, self.name = application(), f"inject-{uuid.uuid4().hex[:8]}"
        self._lease = 0
        self.result: Result | None = None
        self.injectable: Sequence[str] = ()

    def watch(self, picture: Picture) -> None:
        """Give the order when its time has come."""
        if self.result is not None or picture.step < 8:
            return
        with self._etcd.client() as client:
            (run_id,) = [one for one in jobs(client, "/elastic3d") if one.startswith(self.name)]
            self.injectable = read_status(client, job_of(client, "/elastic3d", run_id)).injectable
            where = ["--node", self._node, "--endpoint", self._etcd.endpoint, "--id", run_id]
            self.result = CliRunner().invoke(
                self._app, ["chaos", "inject", *self._arguments, *where, "--json"], catch_exceptions=False
            )
            if self._past:
                self._write(client, f"/elastic3d/{run_id}/")

    def _write(self, client: EtcdClient, root: str) -> None:
        (member,) = (item for item in client.range(root + keys.MEMBERS)[0] if f"/{self._node}@" in item.key)
        id = member.key.rpartition("/")[2]
        self._lease, _ = client.grant(30)
        for number in ("1", "2"):
            client.txn([], [Put(root + keys.fault(id, number), encode(ordered("kill-trainer")), self._lease)])

    def end(self) -> None:
        """Take back what was written past the command."""
        if self._lease:
            with self._etcd.client() as client:
                client.revoke(self._lease)


def played(setting: Setting, operator: Operator, etcd: EtcdServer, workdir: Path) -> tuple[Outcome, Result]:
    outcome = play(setting, etcd=etcd, workdir=workdir / "job", name=operator.name, watch=operator.watch)
    operator.end()
    assert operator.result is not None, outcome.failure
    return outcome, operator.result


def said(workdir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in events(workdir / "job") if event["event"] == name]


def test_a_trainer_killed_in_a_live_job_changes_no_bit(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The command returns once the node does it; the node wrote it down before, and the job goes on by itself."""
    operator = Operator(job_etcd, "kill-trainer", node="node1")
    outcome, result = played(OPEN, operator, job_etcd, tmp_path)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["fault"], document["node"], document["slot"]) == ("kill-trainer", "node1", 0)
    assert operator.injectable == ("node0", "node1")
    (injected,) = said(tmp_path, "fault.injected")
    assert (injected["node"], injected["fault"], injected["by"]) == ("node1", "kill-trainer", document["by"])
    (crashed,) = [one for one in said(tmp_path, "trainer.exited") if one["kind"] == "crash"]
    assert (crashed["node"], crashed["at"] > injected["at"]) == ("node1", True)
    held(outcome, quiet(CLOSED))
    assert [view.cause for view in outcome.picture.generations] == ["start", "failure"]


@pytest.mark.long
def test_a_job_that_does_not_allow_it_is_left_alone(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """By the command, which says so, and by the node, where somebody writes past it."""
    operator = Operator(job_etcd, "kill-trainer", node="node1", past=True)
    outcome, result = played(CLOSED, operator, job_etcd, tmp_path)
    assert result.exit_code == 2
    assert "node1 was not started with --rdzv-conf=chaos=allow" in result.stderr
    assert operator.injectable == ()
    (refused,) = said(tmp_path, "fault.refused")
    assert (refused["node"], said(tmp_path, "fault.injected")) == ("node1", [])
    assert [view.cause for view in outcome.picture.generations] == ["start"]
    assert compare(outcome, quiet(CLOSED)) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "causes"),
    [
        pytest.param(["kill-template"], {"failure"}, id="kill-template", marks=pytest.mark.slow),
        pytest.param(["freeze"], {"stuck"}, id="freeze"),
        pytest.param(["pause", "--seconds", "1"], set(), id="pause", marks=pytest.mark.slow),
        pytest.param(["kill-keeper"], {"death"}, id="kill-keeper"),
        pytest.param(["kill"], {"death"}, id="kill", marks=pytest.mark.slow),
        pytest.param(["stop", "--seconds", "4"], {"death", "join"}, id="stop", marks=pytest.mark.slow),
    ],
)
def test_whatever_is_ordered_the_bits_are_the_same(
    arguments: list[str], causes: set[str], job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """Each of the words, on real processes; two of three nodes train on where one goes with it, or is put out."""
    outcome, result = played(THREE, Operator(job_etcd, *arguments, node="node1"), job_etcd, tmp_path)
    assert result.exit_code == 0, result.output
    assert compare(outcome, quiet(CLOSED)) == []
    assert {view.cause for view in outcome.picture.generations} - {"start"} <= causes
    assert [one["fault"] for one in said(tmp_path, "fault.injected")] == arguments[:1]
    assert outcome.leftovers == ()
