"""What a person reads about a generation that stood still."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from chaos.servers.etcd import EtcdServer
from elastic3d import etcd_keys as keys
from elastic3d.cli import application
from elastic3d.etcd import EtcdClient
from elastic3d.health.evidence import EvidenceWriter
from elastic3d.health.explanation import _TODO, Formed, explain, page
from elastic3d.health.stuck import Fault, judge
from elastic3d.membership.records import GenerationHistory, encode
from elastic3d.membership.stalls import RankState, Stall, Verdict, VerdictKind
from elastic3d.values import Cause, Layout
from elastic3d.worker.journal import Journal
from tests.health.standstill import STEPS, generation, program, stalls, standstill, with_rank

LAYOUT = Layout(pp=2, dp=2)


@pytest.fixture
def said() -> dict[str, Stall]:
    steps = {rank: [program(LAYOUT, rank) for _ in range(STEPS)] for rank in range(4)}
    ranks = with_rank(
        standstill(LAYOUT, steps, {1: 12}), 1, state=RankState.STOPPED, top_frame="train.py:12 in forward"
    )
    return stalls(generation(LAYOUT), ranks)


@pytest.fixture
def verdict(said: dict[str, Stall]) -> Verdict:
    held = judge(generation(LAYOUT), said, 0.0)
    assert held is not None
    return held


def test_a_rank_at_its_end_is_not_said_to_have_begun_another_step() -> None:
    """It made all of its steps as they ought to be, and one fewer than the others."""
    steps = {rank: [program(LAYOUT, rank) for _ in range(STEPS)] for rank in range(4)}
    ranks = with_rank(standstill(LAYOUT, steps, {1: 0}), 1, phase="leave")
    said = stalls(generation(LAYOUT), ranks)
    held = judge(generation(LAYOUT), said, 0.0)
    assert held is not None
    assert held.fault == Fault.LEFT
    text = " ".join(page(explain(held, stalls={id: stall.ranks for id, stall in said.items()})).split())
    assert "it is at its end, where it waits for no other rank, and others have steps to make" in text
    assert "no beginning" not in text


def test_one_page_says_who_why_what_was_done_and_what_to_do(said: dict[str, Stall], verdict: Verdict) -> None:
    """Everything a person asks first."""
    after = [Formed(number=4, active=4), Formed(number=5, active=3, left=("n1",))]
    text = page(
        explain(verdict, formed=after, stalls={id: stall.ranks for id, stall in said.items()}, evidence=["/events/x"])
    )
    for part in (
        "Generation 4 stood still after step 41: stopped",
        "node n1 (rank 1); not the script's code",
        "3 of the 3 other ranks waited",
        "generation 5 was formed with 3 nodes, without n1",
        "SIGSTOP",
        "/events/x",
        "rank 1 of n1: stopped for 5.0 s at forward, waits for no rank, in train.py:12 in forward",
    ):
        assert part in text, text
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize("fault", list(Fault))
def test_every_class_says_what_to_do(fault: Fault) -> None:
    """A name alone helps nobody."""
    verdict = Verdict(kind=VerdictKind.STUCK, fault=str(fault), key="3.0", step=7, detail="it stood still")
    assert explain(verdict).todo[0] == _TODO[fault]
    assert page(explain(verdict, ended="it stood still twice")).count("it stood still") == 2


def test_a_generation_that_made_no_step_stood_still_before_its_first(said: dict[str, Stall]) -> None:
    """No person knows of a step -1."""
    early = {
        id: replace(stall, ranks=tuple(replace(rank, step=-1, phase="restore") for rank in stall.ranks))
        for id, stall in said.items()
    }
    verdict = judge(generation(LAYOUT), early, 0.0)
    assert verdict is not None
    text = page(explain(verdict))
    assert "stood still before the first step of its generation: stopped" in text
    assert "at restore before the first step of its generation, for 5.0 s" in text
    assert "-1" not in text


def test_a_rank_in_the_scripts_own_code_is_said_to_be_there(said: dict[str, Stall]) -> None:
    """By both lines of the page that speak of it."""
    user = {
        id: replace(stall, ranks=tuple(replace(rank, phase="user", state=RankState.IDLE) for rank in stall.ranks))
        for id, stall in said.items()
    }
    verdict = judge(generation(LAYOUT), user, 0.0)
    assert verdict is not None
    assert (verdict.fault, verdict.program) == (Fault.USER, False)
    text = page(explain(verdict))
    assert "idle in the script's own code" in text
    assert "node n1 (rank 1); the script's own code" in text


SLOW = Verdict(
    kind=VerdictKind.SLOW,
    fault="recut",
    key="4.1",
    step=900,
    detail="n1 takes 1.40 times as long (compute); its stage gets less to compute: steps of 1.1 s instead of 1.3 s",
    culprits=("n1@7",),
    ranks=(1,),
    before=1.3,
    after=1.1,
    rungs=("recut: steps of 1.1 s, 15% less", "evict: steps of 1.6 s, 23% more: not worth a change"),
)


def test_a_slow_node_is_explained_with_what_could_be_done() -> None:
    """And no word of a standstill; whatever is only reported says how to do it."""
    text = page(explain(SLOW, formed=[Formed(number=5, active=3)]))
    for part in ("node n1 (rank 1)", "recut", "boundary between two steps for generation 5", "evict: steps of 1.6 s"):
        assert part in text, text
    assert "stood still" not in text
    text = page(explain(replace(SLOW, fault="evict", act=False)))
    assert "it was only reported" in text
    assert "`elastic3d quarantine n1`" in text


def test_the_command_reads_what_was_done_about_slow_nodes(tmp_path: Path) -> None:
    """From the events of whoever led."""
    journal = Journal(str(tmp_path), "job", "n0")
    journal.concluded(SLOW)
    journal.close()
    document = json.loads(run("--events", str(tmp_path), "--json").output)
    assert (document["kind"], document["fault"], document["nodes"]) == ("slow", "recut", ["n1"])
    assert document["rungs"] == list(SLOW.rungs)


SHORT = Verdict(
    kind=VerdictKind.MEMORY,
    fault="recompute full",
    key="1.4",
    step=0,
    detail="rank 1 on n1 ran out of its device's memory; from now on pp 1 x dp 2 x tp 1, ZeRO-3, recompute full",
    culprits=("n1@7",),
    ranks=(1,),
)


def test_memory_that_ran_out_is_explained_with_the_rung_that_was_taken() -> None:
    """Or with what to leave open, where there was none; it is no word about who is at fault."""
    text = page(explain(SHORT, formed=[Formed(number=2, active=2)]))
    for part in (
        "Generation 1 ran out of memory before its first step: recompute full",
        "node n1 (rank 1): what a rank needs follows from its place in the mesh",
        "generation 2 was formed to need less, with the same bits",
        "memory.exhausted in the events names it",
    ):
        assert part in text, text
    text = page(explain(replace(SHORT, fault="none", act=False, step=7), ended="out of memory"))
    assert "after step 7: none" in text
    assert "the same layout was tried again, and the job ended: out of memory" in text
    assert "leave layout= and the ZeRO stage open" in text


def test_the_command_reads_where_memory_ran_out(tmp_path: Path) -> None:
    """From the events of whoever led, and of no bundle: there is none."""
    journal = Journal(str(tmp_path), "job", "n0")
    journal.concluded(SHORT)
    journal.close()
    document = json.loads(run("--events", str(tmp_path), "--json").output)
    assert (document["kind"], document["fault"], document["nodes"]) == ("memory", "recompute full", ["n1"])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ["explain", *arguments])


def test_the_command_reads_what_nodes_left(tmp_path: Path, said: dict[str, Stall], verdict: Verdict) -> None:
    """Long after the job, on any machine, from the folder of events alone."""
    writer = EvidenceWriter(str(tmp_path), "n0", 0, limit=1 << 20)
    writer.conclude(verdict, said)
    assert writer.flush(30)
    sealed = {"event": "generation.sealed", "number": 5, "cause": "stuck", "nodes": ["n0", "n2"], "at": 1.0}
    (tmp_path / "n0-0.jsonl").write_text(json.dumps(sealed) + "\n" + '{"event": "gener')
    shown = run("--events", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    assert "generation 5 was formed with 2 nodes" in shown.output
    document = json.loads(run("4", "--events", str(tmp_path), "--json").output)
    assert (document["schema"], document["nodes"], document["ranks"]) == (1, ["n1"], [1])
    assert document["silent"][1]["state"] == "stopped"
    assert document["evidence"] == [str(tmp_path / "evidence" / "4.1-41-stuck-n0")]
    nothing = run("3", "--events", str(tmp_path))
    assert nothing.exit_code == 1
    assert "nothing was found about generation 3" in nothing.output
    assert run("--events", str(tmp_path / "none")).exit_code == 2


@pytest.mark.etcd
def test_the_command_reads_etcd_too(verdict: Verdict) -> None:
    """Without a folder: what was found about the last generations stays there, and so does what followed."""
    after = GenerationHistory(
        number=5,
        attempt=0,
        cause=Cause.STUCK,
        detail=verdict.detail,
        leader="n0",
        active=3,
        spares=0,
        joined=(),
        left=("n1",),
        layout="pp 1 x dp 3",
        at=1.0,
    )
    with EtcdServer() as server:
        with EtcdClient(server.endpoint) as client:
            root = "/elastic3d/gpt-1b/"
            client.put(root + keys.verdict(verdict.key), encode(verdict))
            client.put(root + keys.history(5, 0), encode(after))
        shown = run("--endpoint", server.endpoint)
        assert shown.exit_code == 0, shown.output
        assert "generation 5 was formed with 3 nodes, without n1" in shown.output
        nothing = run("9", "--endpoint", server.endpoint)
        assert nothing.exit_code == 1
        assert "--events FOLDER reads them" in nothing.output
        with EtcdClient(server.endpoint) as client:
            back = replace(after, number=6, cause=Cause.SPIKE, detail="the loss of step 120 is 9.5", left=())
            client.put(root + keys.history(6, 0), encode(back))
            lies = replace(after, number=7, cause=Cause.LYING, detail="n2: rank 2 computes wrongly: other bits")
            client.put(root + keys.history(7, 0), encode(lies))
        # What ended a generation stays there in one sentence.
        shown = run("--endpoint", server.endpoint)
        assert "Generation 6: a device computes wrongly" in shown.output
        assert "node n2" in shown.output
        shown = run("5", "--endpoint", server.endpoint)
        assert "Generation 5: the loss jumped up" in shown.output
        assert "the loss of step 120 is 9.5" in shown.output
