"""Nodes that are really slow, in real jobs: the right one is named, within its bar, and nobody where nobody is slow.

Each ends with the bits of a job to which nothing happened.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from chaos.faults.moment import When
from chaos.faults.network import Delay
from chaos.faults.orders import Join
from chaos.judging.oracle import compare
from chaos.machine.network import Network
from chaos.playing.play import play
from chaos.score.kinds import KINDS, KNOWN, LINKED, LONG, SETTLED, WORK
from chaos.score.playing import play_trial, setting
from chaos.score.reading import read
from chaos.score.trials import Trial
from chaos.servers.etcd import EtcdServer
from elastic3d.values import Layout
from tests.histories.conftest import Quiet

# Hundreds of steps, twice: on a busy machine a step takes most of a second.
pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(1500)]

PAIR = Layout(pp=1, dp=2)
BEGINS, STEPS = 24, 120
SQUARE = Layout(pp=2, dp=2)


@pytest.mark.slow
def test_the_slow_node_is_named_in_a_real_job(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """On a machine that is busy besides, too: its blocks take two and a half times as long."""
    calm = setting(None, PAIR, STEPS)
    options = (*calm.options, f"--work={WORK}", f"--fault=slow:1@{BEGINS}:2.5")
    outcome = play(replace(calm, options=options), etcd=job_etcd, workdir=tmp_path)
    trial = Trial(kind="slow", rank=1, step=BEGINS, micro_batch=0, layout=PAIR)
    result = read(trial, outcome, quiet(calm), tmp_path)
    assert result.broken == ()
    assert result.same_bits
    assert result.classed, result.said
    assert result.named, result.said


@pytest.mark.slow
@pytest.mark.parametrize("layout", [PAIR, Layout(pp=1, dp=3), SQUARE], ids=str)
@pytest.mark.parametrize("kind", [kind for kind, row in KINDS.items() if row.lasts])
def test_who_is_slow_is_named(kind: str, layout: Layout, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Its node and no other, and what is slow about it; in a control nobody."""
    trial = Trial(kind=kind, rank=1, step=SETTLED, micro_batch=0, layout=layout)
    undisturbed = quiet(setting(None, PAIR, LONG))
    result = play_trial(trial, lambda: undisturbed, etcd=job_etcd, workdir=tmp_path, steps=LONG)
    assert result.broken == ()
    assert result.same_bits
    if KINDS[kind].control:
        assert result.first is None, result.said
        return
    assert result.happened
    assert result.classed, result.said
    assert result.named, result.said
    # How soon depends on how busy this machine is besides; the score card says that.


@pytest.mark.slow
@pytest.mark.netns
def test_whose_connections_are_slow_is_named(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Of nodes that are hosts of their own: the one whose cable is late, and no other."""
    trial = Trial(kind="link", rank=1, step=KINDS["link"].begins, micro_batch=0, layout=SQUARE)
    undisturbed = quiet(setting(None, PAIR, setting(trial, SQUARE, 1).steps))
    result = play_trial(trial, lambda: undisturbed, etcd=job_etcd, workdir=tmp_path, steps=1)
    assert result.broken == ()
    assert result.same_bits
    assert result.happened
    assert result.classed, result.said
    assert result.named, result.said


@pytest.mark.slow
@pytest.mark.netns
def test_a_spare_takes_the_place_of_a_node_whose_cable_is_late(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """All leave for it between two steps, none is made again, and from then on steps are as fast as before."""
    calm = setting(None, SQUARE, LINKED)
    undisturbed = quiet(setting(None, PAIR, LINKED))
    join, late = When(step=SETTLED), When(step=KNOWN)
    with Network() as network, EtcdServer(also=network.address) as etcd:
        made = replace(calm, options=(*calm.options, f"--work={WORK}"), network=network)
        faults = (Join(when=join), Delay(node="node1", late=0.01, seconds=math.inf, when=late))
        outcome = play(made, faults, etcd=etcd, workdir=tmp_path)
    assert compare(outcome, undisturbed) == []
    *_, before, after = outcome.picture.generations
    assert (before.cause, after.cause) == ("start", "balance"), outcome.picture.news
    assert after.nodes == tuple("node4" if node == "node1" else node for node in before.nodes)
    assert (after.steps_repeated, after.spares) == (0, ("node1",))
    assert after.first_step is not None
    slow, cured = (
        median(step.seconds for step in outcome.picture.steps if first <= step.number < last)
        for first, last in ((KNOWN + 2, after.first_step), (after.first_step + 2, LINKED + 1))
    )
    assert cured < 0.6 * slow
