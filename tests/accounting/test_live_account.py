"""The account of a live job: no node-second twice, none lost, and the same as `elastic3d goodput` has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.accounting.goodput import Goodput
from elastic3d.accounting.live_account import HEARD, Input, LiveAccount, NodesOutside
from elastic3d.accounting.live_record import GoodputRecord
from elastic3d.accounting.recorded_events import SECOND, RecordedEvent, recorded
from elastic3d.accounting.spans import Category
from elastic3d.values import from_json, to_json
from tests.accounting.written import EPOCH, STALL, TWO, account, started

FOLDER = Path(__file__).parents[1] / "testdata" / "accounting" / "events"


def event(name: str, at: float, generation: int = 0, **fields: object) -> RecordedEvent:
    return RecordedEvent(name=name, at=round(at * SECOND), node="a", generation=generation, fields=fields)


def seal(number: int, at: float, nodes: list[str], cause: str = "death", spares: tuple[str, ...] = ()) -> RecordedEvent:
    return event("generation.sealed", at, number=number, nodes=nodes, spares=list(spares), cause=cause)


def step(number: int, at: float, generation: int = 1, seconds: float = 1.0, **fields: object) -> RecordedEvent:
    return event("step.committed", at, generation, step=number, seconds=seconds, **fields)


def taken(*inputs: Input) -> LiveAccount:
    live = LiveAccount("a")
    for one in inputs:
        live.take(one)
    return live


def spent(live: LiveAccount, now: float) -> dict[str, float]:
    record = live.record(round(now * SECOND), 0.0)
    return {name: time / SECOND for name, time in record.by_category.items()}


def outside(lines: dict[str, list[RecordedEvent]]) -> Iterator[NodesOutside]:
    """Yield what a leader would hear of newcomers and leavers."""
    seals = {e.whole("number"): e for mine in lines.values() for e in reversed(mine) if e.name == "generation.sealed"}
    marks: list[tuple[int, str, tuple[str, ...]]] = [
        *((e.at, "in", (node,)) for node, mine in lines.items() for e in mine if e.name == "member.joined"),
        *((mine[-1].at, "out", (node,)) for node, mine in lines.items()),
        *((e.at, "seal", e.names("nodes") + e.names("spares")) for e in seals.values()),
    ]
    there: set[str] = set()
    inside: set[str] = set()
    former: set[str] = set()
    for at, what, names in sorted(marks):
        match what:
            case "in":
                there |= {*names}
            case "out":
                there -= {*names}
            case _:
                former, inside = former | inside, {*names}
        beside = there - inside
        yield NodesOutside(at=at, joining=len(beside - former), leaving=len(beside & former))


def heard(node: str, lines: dict[str, list[RecordedEvent]]) -> list[Input]:
    """Return what the keeper of a node heard: its own journal, the steps of all, and who is there."""
    own = [one for one in lines[node] if one.name in HEARD and one.name != "step.committed"]
    steps = [one for mine in lines.values() for one in mine if one.name == "step.committed"]
    inputs: list[Input] = [*own, *steps, *outside(lines)]
    return sorted(inputs, key=lambda one: one.at)


def test_the_record_agrees_with_the_files_of_a_real_run() -> None:
    """Within 0.4 node-seconds in each category, of 42 in all.

    It does not know how long nodes took until they were members, and what was lost with a node from what was noticed
    late. The node that leads after the death of the first leader is the one that accounts.
    """
    texts = {path.name.removesuffix("-0.jsonl"): path.read_text().splitlines() for path in FOLDER.glob("*.jsonl")}
    run, _, files = account(texts)
    lines = {node: [e for line in mine if (e := recorded(line, node)) is not None] for node, mine in texts.items()}
    live = LiveAccount("node2")
    for one in heard("node2", lines):
        live.take(one)
    record = live.record(run.last, 0.0)
    known = {name: time / SECOND for name, time in record.by_category.items()}
    exact = {category.value: time / SECOND for category, time in files.by_category.items()}
    for name in ("useful", "preparing", "restoring", "forming", "data", "saving", "spare", "waiting"):
        assert known.get(name, 0.0) == pytest.approx(exact[name], abs=0.4), name
    lost = known["repeated"] + known.get("noticing", 0.0)
    assert lost == pytest.approx(exact["repeated"] + exact["noticing"], abs=0.4)
    assert record.steps == files.steps == 24
    unregistered = sum(next(e.at for e in mine if e.name == "member.joined") - mine[0].at for mine in lines.values())
    held = sum(known.values()) + unregistered / SECOND
    assert held == pytest.approx(files.held / SECOND, abs=0.4)
    costs = {one.cause: one.microseconds / SECOND for one in files.generations}
    for cause, table in record.by_cause.items():
        assert sum(table.values()) / SECOND == pytest.approx(costs[cause], abs=0.4), cause


def test_made_up_runs_agree_too() -> None:
    """A death, steps that are lost, and waits: categories as `elastic3d goodput` has them, but for the end of `c`."""
    written = started([*TWO, "c"])
    at = written.steps(1, 4, 3, 1, "a")
    written.step(5, at + 1, 1, "a")
    at += 1
    for node in TWO:
        written.say(node, at + 2, "peer.lost", peer="c", evidence="silent")
    written.say("c", at + 1, "snapshot.held", generation=1, step=5)
    written.seal(2, at + 3, "death", TWO)
    written.begin(2, at + 3, TWO, step=3)
    at = written.steps(4, 8, at + 5, 2, "a")
    written.step(9, at + 2, 2, "a", seconds=2.0, data=0.25, copy=0.125)
    written.say("b", at + 2, "snapshot.held", generation=2, step=9)
    run, _, files = written.read()
    lines = {node: [e for one in mine if (e := of(one)) is not None] for node, mine in written.lines.items()}
    live = LiveAccount("a")
    for one in heard("a", lines):
        live.take(one)
    known = {name: time / SECOND for name, time in live.record(run.last, 0.0).by_category.items()}
    exact = {category.value: time / SECOND for category, time in files.by_category.items() if time}
    del exact["joining"], known["joining"]
    assert known == exact
    assert {cause: sum(table.values()) for cause, table in live.record(run.last, 0.0).by_cause.items()} == {
        one.cause: one.microseconds for one in files.generations
    }


def test_what_other_ranks_waited_for_is_in_both() -> None:
    """Of steps whose rows all keepers heard; `b` is told of apart. What rank 0 alone had measured no longer counts."""
    written = started(TWO)
    at = 3.0
    for number in range(1, 25):
        at += 1.0
        written.step(number, at, 1, "a", data=0.25, copy=0.125)
        if number in (16, 24):
            about = {"first": number - 15, "last": number - 8, "data": 0.5, "saving": 0.0625, "slow": 0.125}
            written.say("a", at, "steps.waited", generation=1, rank=0, **about, apart=[["b", 0.75, 0.0, 0.0]])
    written.say("b", at, "snapshot.held", generation=1, step=24)
    run, _, files = written.read()
    lines = {node: [e for one in mine if (e := of(one)) is not None] for node, mine in written.lines.items()}
    live = LiveAccount("a")
    for one in heard("a", lines):
        live.take(one)
    known = {name: time / SECOND for name, time in live.record(run.last, 0.0).by_category.items()}
    assert (known["data"], known["saving"], known["slow"]) == (
        16 * (0.5 + 0.75) + 2 * 8 * 0.25,
        16 * 0.0625 + 2 * 8 * 0.125,
        16 * 0.125,
    )
    # The first step is a beginning in files, and has no waits there.
    exact = {category.value: time / SECOND for category, time in files.by_category.items() if time}
    assert exact["data"] == known["data"] - (0.5 + 0.75)
    assert written_of("b", files) == {"data": 15 * 0.75 + 8 * 0.25, "saving": 8 * 0.125, "slow": 0.0}
    assert sum(exact.values()) == sum(files.by_category.values()) / SECOND


def written_of(node: str, files: Goodput) -> dict[str, float]:
    mine = next(one for one in files.nodes if one.node == node)
    return {name.value: mine.by_category[name] / SECOND for name in (Category.DATA, Category.SAVING, Category.SLOW)}


def test_waits_are_no_longer_than_steps_and_a_rank_that_stood_still_is_not_forgotten() -> None:
    """More than there is is cut off; rows do not tell of everything."""
    steps = [step(number, float(number)) for number in range(1, 9)]
    waits = event("steps.waited", 8, 1, first=1, last=8, data=99.0, saving=99.0, slow=99.0, apart=[])
    assert spent(taken(seal(1, 0, ["a", "b"], "start"), *steps, waits), 8) == {"data": 16.0}
    slow = event("node.slow", 0.5, 1, nodes=["b"], kind="compute", cost=0.5, since=1, step=1, ranks=[1])
    known = spent(taken(seal(1, 0, ["a", "b"], "start"), slow, *steps, none_waited()), 8)
    assert known == {"useful": 12.5, "slow": 3.5}


def none_waited(**fields: object) -> RecordedEvent:
    about = {"first": 1, "last": 8, "data": 0.0, "saving": 0.0, "slow": 0.0, "apart": []}
    return event("steps.waited", 8, 1, **{**about, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"first": None},
        {"first": 0},
        {"first": 9},
        {"last": 1 << 40},
        {"last": 7},
        {"first": 2},
        {"data": -1.0, "saving": "much", "slow": float("nan"), "apart": [["b"], 7, [3, 1, 1, 1], ["c", 1, 1, 1]]},
        {"apart": {"b": 1.0}},
    ],
    ids=str,
)
def test_waits_that_no_keeper_writes_change_nothing(fields: dict[str, object]) -> None:
    """Of steps that were not made together, or not understood; a node that is not there counts for nobody."""
    steps = [step(number, float(number)) for number in range(1, 9)]
    live = taken(seal(1, 0, ["a", "b"], "start"), *steps, none_waited(**fields))
    assert spent(live, 8) == {"useful": 16.0}


def of(line: dict[str, object]) -> RecordedEvent | None:
    return recorded(json.dumps(line))


def test_a_keeper_that_does_not_train_says_that_it_does_not_know() -> None:
    """It hears of no step: what active nodes do is unknown to it, and spares are spares."""
    live = taken(seal(1, 0, ["b", "c"], "start", spares=("a",)))
    assert spent(live, 10) == {"unknown": 20.0, "spare": 10.0}


def test_what_is_under_way_is_useful_for_as_long_as_a_step_takes() -> None:
    """A job that stands still is not said to be useful."""
    live = taken(seal(1, 0, ["a", "b"], "start"), step(1, 2), step(2, 3), step(3, 4))
    assert spent(live, 9) == {"preparing": 2.0, "useful": 8.0, "unknown": 8.0}


def test_waiting_for_nodes_is_told_from_agreeing() -> None:
    """From when fewer nodes are there than may train."""
    live = taken(
        *(seal(1, 0, ["a", "b"], "start"), step(1, 1), step(2, 2), event("peer.lost", 3, peer="b")),
        *(event("nodes.awaited", 5), seal(2, 10, ["a", "c"])),
    )
    assert spent(live, 10) == {"useful": 4.0, "repeated": 2.0, "forming": 2.0, "waiting": 5.0}


def test_a_run_that_is_over_saves() -> None:
    """From its last step on."""
    live = taken(seal(1, 0, ["a"], "start"), step(1, 1), step(2, 2), event("trainer.exited", 3, 1, kind="done"))
    assert spent(live, 5) == {"useful": 2.0, "saving": 3.0}


def test_a_record_that_no_leader_writes_is_refused() -> None:
    """Whatever is wrong with it is said."""
    for fields, words in (
        ({"by_category": {"useful": -1}}, "useful has -1"),
        ({"by_category": {"idle": 1}}, "idle"),
        ({"settled": {"useful": 5}}, "less time"),
        ({"by_category": {"useful": 1 << 70}}, "useful has"),
        ({"active": -3}, "negative"),
        ({"stretches": [{"generation": 1, "first": 4, "last": 3, "by_category": {}}]}, "from step 4 to 3"),
        ({"slowness": [{"nodes": "a"}]}, "expected a list"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            from_json(GoodputRecord, fields)


NAMES = ("a", "b", "c", "d")


def test_a_rank_that_stood_still_and_went_on_was_waited_for() -> None:
    """By the word of its node's keeper, as in files."""
    written = started(TWO)
    at = written.steps(1, 4, 3, 1, "a")
    written.silent("b", at + 4, 1, STALL)
    written.step(5, at + 10, 1, "a", seconds=10.0)
    written.sort()
    lines = {node: [recorded(json.dumps(line), node) for line in mine] for node, mine in written.lines.items()}
    live = LiveAccount("b")
    for one in heard("b", {node: [one for one in mine if one is not None] for node, mine in lines.items()}):
        live.take(one)
    record = live.record(round((EPOCH + at + 10) * SECOND), 0.0)
    assert record.by_category["slow"] == 2 * 9 * SECOND


@st.composite
def inputs(draw: st.DrawFn, *, failing: bool = True) -> list[Input]:
    """Draw what a keeper may hear, in whatever order, at times that never go back. failing: of failures too."""
    at, number, made, result = 0.0, 0, 0, list[Input]()
    for _ in range(draw(st.integers(1, 60))):
        at += draw(st.sampled_from((0.0, 0.25, 1.0, 7.5)))
        match draw(st.integers(0, 9)):
            case 0 | 1:
                number += 1
                nodes = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
                spares = tuple(name for name in NAMES if name not in nodes and draw(st.booleans()))
                cause = draw(st.sampled_from(("start", "death", "join", "drain")))
                result.append(seal(number, at, nodes, cause, spares))
            case 2:
                result.append(NodesOutside(at=round(at * SECOND), joining=draw(COUNT), leaving=draw(COUNT)))
            case 3:
                parts = [["building", 1.0, 0.0], ["awaiting", 0.5, 0.0], ["loading", 0.25, 0.0]]
                made = min(made, draw(st.integers(0, 12)))
                result.append(event("state.restored", at, number, step=made, parts=parts))
            case 4:
                kind = draw(st.sampled_from(("left", "done", "stopped", *(("crash", "peer_lost") * failing))))
                result.append(event("trainer.exited", at, number, kind=kind))
            case 5:
                name = draw(st.sampled_from(("nodes.awaited", "rank.silent", *(("peer.lost", "rank.stuck") * failing))))
                result.append(event(name, at, number, peer=draw(st.sampled_from(NAMES)), act=True))
            case _:
                made += 1
                result.append(step(made, at, number, draw(st.sampled_from((0.0, 0.5, 99.0))), data=0.1, copy=0.1))
                if made % 8 == 0 and draw(st.booleans()):
                    waits = {name: draw(st.sampled_from((0.0, 0.5, 9.0))) for name in ("data", "saving", "slow")}
                    apart = [[draw(st.sampled_from(NAMES)), 0.25, 0.0, 0.5]]
                    about = {"first": max(1, made - 7), "last": made, "apart": apart, **waits}
                    result.append(event("steps.waited", at, number, **about))
    return result


COUNT = st.integers(0, 3)


@given(inputs(failing=False))
def test_every_node_second_is_in_exactly_one_category(said: list[Input]) -> None:
    """The sums are the time that nodes were there, to the microsecond, and none is ever negative."""
    live, held, at, there, outside = LiveAccount("a"), 0, 0, 0, 0
    for one in said:
        held += (there + outside) * (one.at - at)
        at = one.at
        if isinstance(one, NodesOutside):
            outside = one.joining + one.leaving
        elif one.name == "generation.sealed":
            there = len(one.names("nodes")) + len(one.names("spares"))
        live.take(one)
        record = live.record(at, 0.0)
        assert all(time >= 0 for time in record.by_category.values())
        assert sum(record.by_category.values()) == held
    later = live.record(at + SECOND, 0.0)
    assert sum(later.by_category.values()) == held + SECOND * (there + outside)
    assert all(sum(table.values()) <= held + SECOND * there for table in later.by_cause.values())


@given(inputs())
def test_nodes_that_are_lost_are_held_until_they_were_last_alive(said: list[Input]) -> None:
    """At the most until the next generation is sealed, which is when one knows who was lost."""
    live, least, most, at, sealed = LiveAccount("a"), 0, 0, 0, 0
    names, spares, outside = set[str](), 0, 0
    for one in said:
        most += (len(names) + spares + outside) * (one.at - at)
        least += (spares + outside) * (one.at - at)
        at = one.at
        if isinstance(one, NodesOutside):
            outside = one.joining + one.leaving
        elif one.name == "generation.sealed":
            least += len(names & {*one.names("nodes")}) * (at - sealed)
            names, spares, sealed = {*one.names("nodes")}, len(one.names("spares")), at
        live.take(one)
    record = live.record(at, 0.0)
    assert all(time >= 0 for time in record.by_category.values())
    assert least + len(names) * (at - sealed) <= sum(record.by_category.values()) <= most


@given(inputs(), st.data())
def test_another_leader_goes_on_exactly_where_one_ended(said: list[Input], data: st.DataObject) -> None:
    """From the record as it is in etcd, and what it heard itself since the record's moment."""
    whole, cut = LiveAccount("a"), data.draw(st.integers(0, len(said)))
    for one in said[:cut]:
        whole.take(one)
    record = from_json(GoodputRecord, to_json(whole.record(whole_at(said, cut), 7.0)))
    # Whoever goes back within a generation makes steps again that no longer count.
    moment = next((at for at in range(cut) if is_moment(said[at], record)), None)
    if moment is None:
        return
    names = [one for one in said[: moment + 1] if is_seal(one)]
    assert isinstance(names[-1], RecordedEvent)
    other = LiveAccount.resumed(record, "a", said[moment].at, names[-1].names("nodes"))
    for one in said[moment + 1 :]:
        other.take(one)
    for one in said[cut:]:
        whole.take(one)
    now = whole_at(said, len(said)) + SECOND
    assert other.record(now, 9.0) == whole.record(now, 9.0)


def whole_at(said: list[Input], cut: int) -> int:
    return said[cut - 1].at if cut else 0


def is_seal(one: Input) -> bool:
    return isinstance(one, RecordedEvent) and one.name == "generation.sealed"


def is_moment(one: Input, record: GoodputRecord) -> bool:
    if not isinstance(one, RecordedEvent):
        return False
    if record.step < 0:
        return is_seal(one) and one.whole("number") == record.number
    return one.name == "step.committed" and (one.generation, one.whole("step")) == (record.number, record.step)


def test_a_long_run_stays_small() -> None:
    """Whatever the number of its generations and steps; and going back far takes its share of what was put together."""
    live, at, made = LiveAccount("a"), 0.0, 0
    for number in range(1, 201):
        live.take(seal(number, at, ["a", "b"]))
        for _ in range(10):
            at, made = at + 1, made + 1
            live.take(step(made, at, number))
    record = live.record(round(at * SECOND), 0.0)
    assert len(record.stretches) == 32
    assert len(str(to_json(record))) < 4096
    assert (record.steps, record.by_category["useful"]) == (2000, 4000 * SECOND)
    live.take(seal(201, at, ["a", "b"]))
    live.take(event("state.restored", at, 201, step=500, parts=[]))
    record = live.record(round(at * SECOND), 0.0)
    assert (record.by_category["useful"], record.by_category["repeated"]) == (1000 * SECOND, 3000 * SECOND)
