"""A job that has to end by a fault, or one of its nodes, ends by an error that says why.

What it has made until then has to be right; what does not end, or ends by another error, is a broken promise as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from chaos.faults.catalogue import KINDS
from chaos.faults.code import RaisedByNewcomer, RaisedEverywhere, RaisedForGood, RaisedOnNode
from chaos.faults.fault import Ends, Fault
from chaos.faults.memory import AllSnapshotFlips
from chaos.faults.moment import When
from chaos.faults.process import Kill, KillBelow
from chaos.history.follow import Event, Injection
from chaos.judging.bars import Bars, promises
from chaos.judging.oracle import Verdict, judge
from chaos.playing.outcome import Outcome
from tests.chaos.judging.test_oracle import quiet
from tests.chaos.made_up_events import BATCH, event, outcome_of, restored, sealed, step

WHEN = When(step=3)
TWO = ["node0", "node1"]
AT, END = 13.5, 16.0
ENDS = "what has to end by a fault ends, by an error that says why"
ASKED = "Traceback (most recent call last):\n  ...\nRuntimeError: rank 1 was asked to raise"
LOST = (
    "elastic3d.errors.StateError: step 3 had been made and was held in memory, and nothing is left of it: no keeper "
    "holds a whole snapshot; start the job with elastic3d.run(..., fresh=True)"
)
BELOW = "1 node(s) for 30 s, the minimum is 2: start more nodes, lower --nnodes, or raise --rdzv-conf=timeout"
FINAL = "Traceback\nelastic3d.errors.UsageError: run.pause: longest='a while': give seconds"
PUT_OUT = (
    "the code of node node1 raised in each of 3 tries, and no other's did: the job goes on without it. Mend what is "
    f"wrong on that node and start it again. {ASKED}"
)
EVERYWHERE, FOR_GOOD = RaisedEverywhere(when=WHEN), RaisedForGood(when=WHEN)
FLIPS, FEW = AllSnapshotFlips(when=WHEN), KillBelow(when=WHEN)
ALONE = RaisedOnNode(rank=1, when=WHEN)


def ended(node: str, error: str, at: float = END) -> Event:
    return event("job.ended", at, node=node, kind="error" if error else "done", error=error or None)


def job(
    fault: Fault, said: Sequence[Event], *, node: str = "", steps: int = 3, codes: tuple[int, int] = (1, 1)
) -> Outcome:
    """Return a job of six steps which a fault was made to after the third, and that ends with what is said then."""
    made = [sealed(1, 10.0, "start", TWO), *(step(n, 10.0 + n, 1) for n in range(1, steps + 1))]
    seen = outcome_of(sorted([*made, *said], key=lambda one: one.at), [(fault, node)], AT, steps=6)
    return replace(
        seen, digest="abc" if steps == 6 else None, exit_codes=dict(zip(TWO, codes, strict=True)), store="file:///s"
    )


def judged(outcome: Outcome) -> Verdict:
    return judge(outcome, quiet(), all_known=True)


def broken(verdict: Verdict) -> dict[str, tuple[str, ...]]:
    return {promise.says: promise.broken for promise in verdict.promises if promise.broken}


def both(error: str) -> list[Event]:
    return [ended(node, error) for node in TWO]


@pytest.mark.parametrize(
    ("fault", "error"), [(EVERYWHERE, ASKED), (FOR_GOOD, FINAL), (FLIPS, LOST), (FEW, BELOW)], ids=str
)
def test_a_job_that_ends_as_it_has_to_breaks_no_promise(fault: Fault, error: str) -> None:
    """It need not make all its steps, and its nodes end with torchrun's own code; its bits until then are compared."""
    verdict = judged(job(fault, both(error)))
    assert broken(verdict) == {}
    by_name = {promise.says: promise for promise in verdict.promises}
    assert (by_name[ENDS].held, by_name[ENDS].seen) == (True, f"the job ended 2.5 s after {fault}")
    assert by_name["the job makes all its steps"].held is None
    assert (verdict.same_bits, verdict.samples.consumed, verdict.samples.missing) == (True, 3 * BATCH, 0)
    other = job(fault, [*both(error), step(3, 13.2, 1, loss=1.0)])
    assert judged(other).same_bits is False


def test_a_job_that_ends_as_it_has_to_is_asked_for_no_more_losses() -> None:
    """Within a tolerance, as of its bits: those until then have to be near, and none has to come after them."""
    ends = job(EVERYWHERE, both(ASKED))
    assert broken(judge(ends, quiet(), all_known=True, tolerance=1e-3)) == {}
    last = ends.picture.steps[-1]
    far = replace(ends.picture, steps=(*ends.picture.steps[:-1], replace(last, loss=(9.0).hex())))
    assert not judge(replace(ends, picture=far), quiet(), all_known=True, tolerance=1e-3).kept
    goes_on = replace(ends, made=(), hit=())
    verdict = judge(goes_on, quiet(), all_known=True, tolerance=1e-3)
    assert "3 steps, undisturbed 6" in verdict.broken


@pytest.mark.parametrize(
    ("said", "codes", "seen"),
    [
        (both("no room on device"), (1, 1), "node0 ended by another error: no room on device; by raise-everywhere"),
        ([ended("node0", ASKED), ended("node1", "")], (1, 0), "node1 ended as if all were well"),
        ([ended("node0", ASKED)], (1, -11), "node1 said nothing of its end"),
    ],
    ids=["another", "well", "silent"],
)
def test_who_ends_otherwise_is_named(said: list[Event], codes: tuple[int, int], seen: str) -> None:
    """By another error, with none, or without a word; and not by the exit code that schedulers know."""
    verdict = broken(judged(job(EVERYWHERE, said, codes=codes)))
    assert seen in " ".join(verdict[ENDS])
    assert ("a node that nobody kills ends well" in verdict) is (codes != (1, 1))


def test_no_step_has_to_follow_by_which_a_job_ends() -> None:
    """However soon somebody asks for the next one."""
    (asked,) = promises(job(FEW, both(BELOW)), (), Bars(recovered=1.0))
    assert (asked.broken, asked.judged) == ((), False)


def test_a_job_of_unknown_length_need_not_save_its_last_step() -> None:
    """Without an undisturbed run it is as long as it was when it had to end."""
    seen = job(FEW, both(BELOW))
    short = replace(seen, setting=replace(seen.setting, steps=3))
    assert broken(judge(short, all_known=True)) == {}


def test_a_job_that_goes_on_though_it_has_to_end_breaks_a_promise() -> None:
    """All its steps do not make up for that."""
    verdict = broken(judged(job(FEW, both(""), steps=6, codes=(0, 0))))
    assert len(verdict[ENDS]) == 2


def test_a_job_that_never_ends_breaks_one_as_ever() -> None:
    """It was given up."""
    assert "it stands" in " ".join(judged(replace(job(FEW, []), failure="it stands")).broken)


def test_a_job_that_ends_by_an_error_for_nothing_breaks_its_promises() -> None:
    """As after a kill, which no job may end by."""
    verdict = broken(judged(job(Kill(node="node1", when=WHEN), both(ASKED), node="node1")))
    assert ENDS not in verdict
    assert {"the job makes all its steps", "nothing that happens makes the script raise"} <= {*verdict}


@pytest.mark.parametrize("at", [13.0, 14.0])
def test_a_checkpoint_is_gone_on_from_where_all_copies_are_lost(at: float) -> None:
    """One that was there before: no job may end then. One that is committed just afterwards may be of use, or not."""
    saved = event("checkpoint.committed", at, step=3, moved=True)
    verdict = broken(judged(job(FLIPS, [saved, *both(LOST)])))
    assert ("the job makes all its steps" in verdict) is (at < AT)
    on = [sealed(2, 14.1, "failure", TWO), restored(2, 14.5, "store", 3), *(step(n, 11.0 + n, 2) for n in (4, 5, 6))]
    whole = job(FLIPS, [saved, *on, event("checkpoint.committed", 18.0, step=6, moved=True), *both("")], codes=(0, 0))
    assert broken(judged(replace(whole, digest="abc"))) == {}


def test_steps_that_are_lost_are_not_made_again_in_silence() -> None:
    """A job that begins anew though nobody asked for it: it has to end, and say what is lost."""
    begins = [
        sealed(2, 14.1, "failure", TWO),
        restored(2, 14.5, "none", 0),
        *(step(n, 20.0 + n, 2) for n in range(1, 7)),
    ]
    again = job(FLIPS, [*begins, event("checkpoint.committed", 27.0, step=6, moved=True), *both("")], codes=(0, 0))
    assert "node0 ended as if all were well" in " ".join(broken(judged(replace(again, digest="abc")))[ENDS])


def test_a_node_that_is_put_out_says_so_and_the_others_go_on() -> None:
    """Of the other one nothing else is promised than ever."""
    on = [
        sealed(2, 14.1, "error", ["node0"]),
        restored(2, 14.5, "memory", 3),
        *(step(n, 11.0 + n, 2) for n in (4, 5, 6)),
    ]
    saved = event("checkpoint.committed", 18.0, step=6, moved=True)

    def alone(error: str, codes: tuple[int, int] = (0, 1)) -> dict[str, tuple[str, ...]]:
        said = [*on, saved, ended("node1", error), ended("node0", "", 19.0)]
        return broken(judged(replace(job(ALONE, said, node="node1", codes=codes), digest="abc")))

    assert alone(PUT_OUT) == {}
    assert [*alone(ASKED)] == [ENDS]
    assert {ENDS, "a node that nobody kills ends well"} == {*alone("", (0, 0))}
    assert alone(PUT_OUT, (1, 1)) == {"a node that nobody kills ends well": ("node0 ended with exit code 1",)}


def test_who_had_left_before_need_not_end_so() -> None:
    """A node that was drained, even if it says so a moment later; another one that ends well is seen."""
    said = [ended("node0", BELOW), ended("node1", "", 13.8)]
    left = replace(job(FEW, said, codes=(1, 0)), injections=(Injection(kind="drain", node="node1", at=13.0),))
    assert broken(judged(left)) == {}
    assert ENDS in broken(judged(replace(left, injections=())))


@pytest.mark.parametrize(("raised", "held"), [(LOST, True), ("rank 0 on node0: ValueError: no", False)])
def test_what_trainers_raise_on_the_way_is_what_the_job_ends_by(raised: str, held: bool) -> None:
    """They say it in words as they raise it, and are known by their exit code thereafter."""
    code = "the trainer of rank 0 exited with code 83"
    tried = [
        event("script.raised", 14.0, generation=2, error=raised, traceback=None, final=False),
        event("trainer.exited", 14.1, generation=2, pid=1, kind="error", step=3, error=code),
    ]
    verdict = broken(judged(job(FLIPS, [*tried, *both(LOST)])))
    assert ("nothing that happens makes the script raise" not in verdict) is held


def test_faults_that_come_after_the_end_are_not_held_against_it() -> None:
    """Where the end was not certain beforehand; those of a job that has to go on are, as ever."""
    undone = (Kill(node="node1", when=When(step=5)),)
    assert broken(judged(replace(job(FLIPS, both(LOST)), undone=undone))) == {}
    calm = replace(job(ALONE, both(PUT_OUT), node="node1"), undone=undone)
    assert "every fault of the schedule comes to pass" in broken(judged(calm))


def test_every_kind_that_ends_by_an_error_says_by_which() -> None:
    """And no other; what keeps a job from ending is said of those alone by which one ends."""
    for word, kind in KINDS.items():
        about = kind.ABOUT
        assert not about.says or about.ends in (Ends.NODE, Ends.JOB), word
        assert about.ends is not Ends.JOB or about.says, word
        assert not about.unless or about.ends is Ends.JOB, word
    assert {word for word, kind in KINDS.items() if kind.ABOUT.says} == {
        *(RaisedByNewcomer.WORD, RaisedOnNode.WORD, RaisedEverywhere.WORD, RaisedForGood.WORD),
        *(KillBelow.WORD, AllSnapshotFlips.WORD),
    }
