"""The status of a job, computed from its keys in etcd, and how it is printed: tests/testdata/status/*.txt.

`pytest tests/cli/status --rewrite-displays` writes the present output; a person reviews the diff.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from elastic3d.cli import render
from elastic3d.cli.status import document
from elastic3d.coverage import AuditCoverage
from elastic3d.etcd import KeyValue
from elastic3d.health.recheck import BYTES, EVERY
from elastic3d.membership import actions as acts
from elastic3d.membership.inspection.derivation import status
from elastic3d.membership.inspection.keys import find, history
from elastic3d.membership.inspection.status import GenerationStatus, JobState, NodeState, NodeStatus, Status
from elastic3d.membership.inspection.uncovered import uncovered
from elastic3d.membership.records import HealthFigures, MemberRecord, Pulse
from tests.cli.status import scenes
from tests.cli.status.scenes import ROOT, SCENES, WALL, Scene
from tests.paths import DATA

DISPLAYS = DATA / "status"
WIDTHS = (120, 80, 44)


def stands(scene: Scene) -> Status:
    items = find(ROOT, scene.items())
    return status("gpt-1b", items, revision=9, remaining=scene.remaining, wall=WALL)


def audits(**coverage: Any) -> HealthFigures:
    return HealthFigures(idle=3.0, busy=30.0, audit=0.01, coverage=AuditCoverage(**coverage))


def states(scene: Scene) -> dict[str, NodeState]:
    return {node.name: node.state for node in stands(scene).nodes}


def printed(what: RenderableType, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


@pytest.fixture
def greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Show times of day in UTC instead of the machine's zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("name", [*SCENES, "events"])
@pytest.mark.usefixtures("greenwich")
def test_display(name: str, request: pytest.FixtureRequest) -> None:
    """The output fits terminals of 120, 80 and 44 columns and is the reviewed one."""
    pictures = []
    for width in WIDTHS:
        if name == "events":
            what = render.generations(history(ROOT, scenes.past().items())[0], WALL, width)
        else:
            what = render.picture(stands(SCENES[name]()), width)
        text = printed(what, width)
        assert max(map(len, text.splitlines())) <= width
        pictures.append(f"{'-' * width}\n{text}\n")
    path, text = DISPLAYS / f"{name}.txt", "".join(pictures)
    if request.config.getoption("--rewrite-displays", default=False):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        ("forming", JobState.FORMING, "2 nodes of at least 3"),
        ("training", JobState.TRAINING, ""),
        ("draining", JobState.TRAINING, ""),
        ("losses", JobState.REFORMING, "b is out"),
        ("waiting", JobState.WAITING, "b is out; there is 1 node of at least 2"),
        ("ended", JobState.ENDED, "main returned on all nodes"),
        ("failed", JobState.FAILED, "the user's code raised on 3 tries"),
    ],
)
def test_a_job_is_in_one_state_with_a_reason(name: str, state: JobState, words: str) -> None:
    """Forming, training, waiting below the minimum and over are told apart from etcd alone."""
    shown = stands(SCENES[name]())
    assert (shown.state, shown.detail[: len(words)]) == (state, words)


def test_a_job_that_allows_faults_says_so() -> None:
    """In one line, so that no job is open by accident; nothing is said where no node allows it."""
    scene = scenes.training()
    assert stands(scene).injectable == ()
    assert "injected" not in printed(render.picture(stands(scene), 120), 120)
    for node in (scenes.A, scenes.B):
        scene.write(node, acts.PutMember(record=MemberRecord(node=node, chaos=True)))
    assert stands(scene).injectable == ("a", "b")
    line = "  faults may be injected into 2 nodes: a, b (chaos=allow)"
    assert line in printed(render.picture(stands(scene), 120), 120).splitlines()


def test_every_state_of_a_node_is_shown() -> None:
    """Drained by an operator or a notice, prepared, dead, gone, silent, doubted, kept out, refused."""
    assert states(scenes.draining()) == {
        "a": NodeState.ACTIVE,
        "b": NodeState.DRAINING,
        "c": NodeState.ACTIVE,
        "d": NodeState.DRAINING,
        "e": NodeState.PREPARED,
    }
    assert states(scenes.losses()) == {
        "a": NodeState.ACTIVE,
        "b": NodeState.OUT,
        "c": NodeState.LOST_LEASE,
        "d": NodeState.SILENT,
        "e": NodeState.DOUBTED,
        "f": NodeState.QUARANTINED,
        "g": NodeState.REFUSED,
        "rack9-h4": NodeState.QUARANTINED,
    }
    nodes = {node.name: node for node in stands(scenes.parted()).nodes}
    assert nodes["e"].state is NodeState.APART
    assert nodes["e"].detail == "no connection between it and a, b: it stands aside until there is one"
    assert nodes["d"].state is NodeState.ACTIVE
    assert nodes["d"].health == ("cannot connect to c, gone",)
    assert states(scenes.garbage())["b"] is NodeState.UNREADABLE
    assert states(scenes.forming()) == {"a": NodeState.JOINING, "b": NodeState.JOINING}
    assert set(states(scenes.ended()).values()) == {NodeState.GONE}


def test_remaining_times_are_shown() -> None:
    """A drain's counts from its stamp, a quarantine's is the rest of its lease; neither is ever out of bounds."""
    drained = {node.name: node.seconds_left for node in stands(scenes.draining()).nodes}
    assert (drained["b"], drained["d"], drained["a"]) == (18.0, 117.0, None)
    scene = scenes.losses()
    scene.remaining = dict.fromkeys(scene.remaining, 77.0)
    assert {node.name: node.seconds_left for node in stands(scene).nodes}["f"] == 77.0
    for wall in (0.0, WALL * 2):
        shown = status("x", find(ROOT, scenes.draining().items()), revision=1, remaining={}, wall=wall)
        assert {node.name: node.seconds_left for node in shown.nodes}["b"] == (30.0 if wall == 0.0 else 0.0)
        assert shown.generation is not None
        assert shown.generation.age is not None
        assert shown.generation.age >= 0.0


def test_figures_come_from_the_running_generation() -> None:
    """The step is the newest reported, the snapshot one that every active node holds; older pulses do not count."""
    shown = stands(scenes.training())
    assert (shown.step, shown.step_seconds) == (1240, 0.49)
    assert shown.snapshot is not None
    assert shown.snapshot.step == 1237
    assert shown.checkpoint is not None
    assert shown.checkpoint.step == 1200
    scene = scenes.training()
    assert stands(scene.put("pulses/a@1", scenes.pulse(snapshot_every=9))).snapshot_every == 9
    for name in "abcd":
        scene.put(f"pulses/{name}@1", scenes.pulse(generation=3))
    assert (stands(scene).step, stands(scene).snapshot) == (-1, None)
    without = {key: value for key, value in scene.keys.items() if "pulses" not in key}
    assert stands(Scene(keys=without)).step == -1


def test_a_leading_spare_reports_the_checkpoints() -> None:
    """It commits them, active or not; it has no step and no snapshot."""
    scene = scenes.training()
    for name in "abcd":
        scene.put(f"pulses/{name}@1", scenes.pulse(checkpoint_step=-1, verified_step=-1))
    scene.put(f"pulses/{scenes.E.id}", scenes.pulse(9999, state="spare"))
    shown = stands(scene)
    assert shown.step == 1240
    assert shown.checkpoint is not None
    assert shown.verified is not None
    assert (shown.checkpoint.step, shown.verified.step) == (1200, 1190)


def test_a_mesh_shows_the_place_of_each_node() -> None:
    """Rows are stages, columns replicas, in rank order; a node of several slots has several places."""
    four = stands(scenes.training()).generation
    assert four is not None
    assert four.mesh == (("a", "b"), ("c", "d"))
    many = stands(scenes.many()).generation
    assert many is not None
    assert (len(many.mesh), len(many.mesh[0]), many.mesh[1][7]) == (20, 24, "gpu-03")


def test_two_incarnations_of_a_name_are_two_nodes() -> None:
    """The generation has the dead one, the roster the new one: both are shown, each with its own state."""
    scene = scenes.losses()
    again = scenes.node("b", incarnation="2")
    scene.write(again, scenes.acts.PutMember(record=scenes.MemberRecord(node=again)))
    rows = [(node.incarnation, node.state) for node in stands(scene).nodes if node.name == "b"]
    assert rows == [("1", NodeState.OUT), ("2", NodeState.JOINING)]


@pytest.mark.parametrize(
    ("watch", "words"),
    [
        (HealthFigures(idle=0.0, busy=0.0), "ranks that stand still: health is off"),
        (HealthFigures(idle=3.0, busy=30.0), "devices that compute wrongly: audits are off"),
        (audits(off="dp=1: no other"), "devices that compute wrongly: dp=1: no other"),
        (audits(every=25, pieces=0.25, nodes=4), "once in the 99 % of the passes that nobody repeats"),
        (audits(every=25, pieces=0.25, nodes=4), "for up to 49 steps"),
        (HealthFigures(idle=3.0, busy=30.0), "nodes that are slow: nobody measures them"),
        (HealthFigures(idle=3.0, busy=30.0, slow_from=1.15), "nodes less than 1.15 times as slow"),
        (audits(every=1, pieces=1.0, nodes=1), "faults that strike every time"),
        (audits(every=1, pieces=1.0, nodes=2), "which of two nodes errs"),
        (HealthFigures(idle=3.0, busy=30.0), "the optimizer's arithmetic"),
        (HealthFigures(idle=3.0, busy=30.0, at_rest=0.005), f"in one step of {EVERY}, {BYTES >> 20} MiB"),
        (
            HealthFigures(idle=3.0, busy=30.0, at_rest=0.005, unchecked=("updates: nobody, since Muon differs",)),
            "updates: nobody, since Muon differs",
        ),
    ],
)
def test_what_is_not_covered_is_said_in_numbers(watch: HealthFigures, words: str) -> None:
    """Nobody is to believe that a run is watched more closely than it is."""
    assert any(words in line for line in uncovered(watch)), uncovered(watch)


def test_checks_that_are_off_are_said_and_not_counted_as_made() -> None:
    """Those of all nodes, a few of many; what is not checked at all is not said to be checked in part."""
    off = tuple(f"state at rest: the script writes to it on rank {rank}" for rank in range(9))
    lines = uncovered(HealthFigures(idle=3.0, busy=30.0, at_rest=0.005, unchecked=("updates: nobody", *off)))
    assert sum("state at rest: " in line for line in lines) < 5
    assert any("6 more checks that are off" in line for line in lines)
    assert not any("goes wrong once" in line for line in lines)
    shown = stands(scenes.audited()).health
    assert shown is not None
    assert "updates: nobody makes those of d again" in shown.uncovered


def test_health_is_that_of_the_nodes_that_train() -> None:
    """Audits vouch for what all of them say; the display names the node that lags behind."""
    shown = stands(scenes.audited())
    assert shown.health is not None
    assert (shown.health.idle, shown.health.audit, shown.health.clean) == (3.0, 0.01, 1150)
    assert {node.name: node.clean for node in shown.nodes} == {"a": 1225, "b": 1225, "c": 1225, "d": 1150, "e": -1}
    assert "(d 1150)" in printed(render.picture(shown, 120), 120)
    assert [slow.node for slow in shown.health.slow] == ["c"]
    assert stands(scenes.forming()).health is None


def test_the_status_says_what_is_vetted_or_why_nothing_is() -> None:
    """Whatever one node knows: only the one that leads looks after it."""
    vetted = stands(scenes.audited()).vetted
    assert vetted is not None
    assert vetted.step == 1190
    shown = stands(scenes.unaudited())
    assert shown.vetted is None
    assert "vetted: none, since audits are off: health=elastic3d.Health(audit=...)" in printed(
        render.picture(shown, 120), 120
    )


def test_unreadable_keys_are_problems() -> None:
    """Garbage, a newer schema, a foreign record, a malformed number and an unknown key: each is one problem."""
    problems = "\n".join(stands(scenes.garbage()).problems)
    for key in ("roll/members/b@1", "board/leader", "pulses/c@1", "roll/members/z@7", "colour", "pulses/d@1"):
        assert ROOT + key in problems
    assert problems.count("\n") == 5


ALL = tuple(item for name in SCENES for item in SCENES[name]().items())
ODD = (b"", b"{}", b"[" * 100_000, b'{"schema":1}', b'{"schema":1,"state":"x","generation":1,"every":1e999}')
VALUES = (*(item.value for item in ALL), *ODD)


@given(
    st.dictionaries(st.sampled_from([item.key for item in ALL]), st.sampled_from(VALUES), max_size=12),
    st.sets(st.sampled_from(ALL)),
    st.floats(0, 1e12),
    st.sampled_from([20, 44, 80, 200]),
)
def test_any_keys_give_a_status(wrong: dict[str, bytes], some: set[KeyValue], wall: float, width: int) -> None:
    """Any subset of keys with any contents gives a status that can be shown and is plain JSON."""
    scene = Scene(keys={**{item.key: item.value for item in some}, **wrong})
    items = find(ROOT, scene.items())
    shown = status("gpt-1b", items, revision=1, remaining={}, wall=wall)
    printed(render.picture(shown, width), width)
    printed(render.generations(history(ROOT, scene.items())[0], wall, width), width)
    json.dumps(document(shown), allow_nan=False)


def test_the_json_schema_is_stable() -> None:
    """Programs read it: removing a field or changing its meaning needs a new schema number."""
    data = document(stands(scenes.draining()))
    assert data["schema"] == 1
    assert (
        data.keys() - {"schema"}
        == {field.name for field in fields(Status)}
        == {
            *("run_id", "revision", "state", "detail", "leader", "generation", "preparing", "nodes", "step"),
            *("step_seconds", "snapshot", "snapshot_every", "checkpoint", "verified", "suspects", "verdict", "health"),
            *("minimum", "maximum", "problems", "vetted", "unvetted", "injectable", "loss", "until", "goodput"),
        }
    )
    assert (
        data["generation"].keys()
        == {field.name for field in fields(GenerationStatus)}
        == {
            *(
                "number",
                "attempt",
                "cause",
                "detail",
                "layout",
                "world",
                "nodes",
                "spares",
                "mesh",
                "age",
                "switching",
                "memory",
            ),
        }
    )
    assert (
        data["nodes"][0].keys()
        == {field.name for field in fields(NodeStatus)}
        == {
            *("name", "incarnation", "machine", "state", "role", "leads", "detail", "seconds_left", "first_rank"),
            *("slots", "address", "labels", "device", "health", "pulse", "clean"),
        }
    )
    assert data["nodes"][0]["pulse"].keys() == {field.name for field in fields(Pulse)}
    assert data["snapshot"].keys() == {"step", "age", "within"}
