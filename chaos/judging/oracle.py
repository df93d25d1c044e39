"""Judge a history: by its own events, and by an undisturbed run of the same seed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chaos.faults.clock import ClockJump
from chaos.faults.data import Nan, Spike
from chaos.history.claims import deposed
from chaos.history.follow import Ledger, ledger
from chaos.judging import endings, explained, notices
from chaos.judging.explained import BEFORE, UNKNOWN
from chaos.judging.losses import again_promise, near_promise
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome
from chaos.playing.own_script import ScriptSetting

GOES_ON, WHOLE, SAVED = "the job never stands still for good", "the job makes all its steps", "the last step is saved"
"""Promises of how a job ends."""
_EXITED = re.compile(r"the trainer of rank \d+ exited with code \d+")
HARMLESS = (ClockJump.WORD, Nan.WORD, Spike.WORD)
"""What nobody to whom it is done may be named for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a history proves. same_bits: None if nothing was compared. broken: each broken promise, as text.

    tolerance: within which losses were judged instead of bits, None where bits were. same_losses: whether they are near
    to those of the undisturbed run, None if they were not compared.
    """

    same_bits: bool | None
    samples: Ledger
    broken: tuple[str, ...]
    promises: tuple[Promise, ...] = ()
    tolerance: float | None = None
    same_losses: bool | None = None

    @property
    def kept(self) -> bool:
        """Whether every promise held."""
        return not self.broken

    @property
    def told(self) -> tuple[str, ...]:
        """Each broken promise, with what was promised, and by which page."""
        return tuple(text for promise in self.promises for text in promise.told)

    def with_promises(self, more: Iterable[Promise]) -> Verdict:
        """Return this verdict with more promises, judged elsewhere."""
        more = tuple(more)
        broken = tuple(text for promise in more for text in promise.broken)
        return replace(self, promises=(*self.promises, *more), broken=(*self.broken, *broken))


def of_one_that_was_ended(promises: Iterable[Promise], why: str) -> Iterator[Promise]:
    """Yield what is promised of a job that was ended by us, since something broke: nothing is asked of its end."""
    for one in promises:
        of_its_end = one.says in (GOES_ON, WHOLE, SAVED)
        yield replace(one, seen=f"it was ended: {why}", broken=(), judged=False) if of_its_end else one


def all_is_known(arguments: Iterable[str]) -> bool:
    """Return whether a script with these arguments does nothing to itself that no outcome has."""
    return not any(one == "--fault" or one.startswith("--fault=") for one in arguments)


def judge(
    outcome: Outcome, quiet: Outcome | None = None, *, all_known: bool = False, tolerance: float | None = None
) -> Verdict:
    """Return what `outcome` proves; with `quiet`, whether it has the bits of an undisturbed run.

    tolerance: within which share of each loss its losses are asked for, instead of its bits.

    all_known: `outcome` has all that was done to the job, so that nobody else may be named. A script that fails by
    itself does more.
    """
    # A job that has to end consumes what it has made steps of.
    steps = outcome.setting.steps if endings.of_job(outcome) is None else outcome.picture.step
    samples = ledger(outcome.picture.steps, outcome.setting.consumed(steps))
    promises = tuple(_promises(outcome, samples, quiet, all_known, tolerance))
    return Verdict(
        same_bits=None if quiet is None or tolerance is not None else not compare(outcome, quiet),
        samples=samples,
        broken=tuple(text for promise in promises for text in promise.broken),
        promises=promises,
        tolerance=tolerance,
        same_losses=None if tolerance is None else near_promise(outcome, quiet, tolerance).held,
    )


def _promises(
    outcome: Outcome, samples: Ledger, quiet: Outcome | None, all_known: bool, tolerance: float | None
) -> Iterator[Promise]:
    picture = outcome.picture
    yield Promise(
        says=GOES_ON,
        page="reference/failures.md",
        seen="it ended by itself",
        broken=(outcome.failure,) if outcome.failure else (),
    )
    yield _exits(outcome)
    yield _errors(outcome)
    yield endings.promise(outcome)
    yield from _ending(outcome, known=quiet is not None or not isinstance(outcome.setting, ScriptSetting))
    yield _made(outcome)
    planned = [view for view in picture.generations if view.planned_repeats]
    yield Promise(
        says="a planned change of nodes repeats no step",
        page="reference/failures.md",
        seen=f"steps made again: {sum(view.steps_repeated for view in picture.generations)}, none for a planned change",
        broken=tuple(
            f"generation {view.number} ({view.cause}) was planned, and repeated {view.planned_repeats} step(s)"
            for view in planned
        ),
    )
    yield _made_again(outcome) if tolerance is None else again_promise(outcome, tolerance)
    lost = f"{samples.missing} samples missing, {samples.repeated} repeated"
    yield Promise(
        says="every sample is consumed once",
        page="guides/scripts.md",
        seen=f"{samples.consumed} samples, none missing, none repeated",
        broken=(lost,) if samples.missing or samples.repeated else (),
    )
    yield Promise(
        says="a generation has one committer: who was followed by another one commits no more",
        page="explanation/design.md",
        seen=f"checkpoints: {len(picture.commits)}, committed by {_names({one.node for one in picture.commits})}",
        broken=tuple(
            f"{one.node} committed step {one.step} in generation {one.generation} after another node had taken over"
            for one in deposed(picture.commits)
        ),
    )
    yield _alarms(outcome, quiet, all_known)
    yield from explained.promises(outcome, quiet, all_known=all_known)
    yield notices.promise(outcome, all_known=all_known)
    yield Promise(
        says="nothing is left behind",
        page="guides/chaos.md",
        seen=""
        if outcome.failure
        else "no process, port, control group, temporary file, shared memory, lease, or key of a job that runs",
        broken=tuple(f"left behind: {left}" for left in outcome.leftovers),
        judged=not outcome.failure,
    )
    yield _same_bits(outcome, quiet) if tolerance is None else near_promise(outcome, quiet, tolerance)


def _made_again(outcome: Outcome) -> Promise:
    return Promise(
        says="a step that is made again has the same bits",
        page="explanation/same-bits.md",
        seen="no step was made with two losses, or of two sets of samples",
        broken=tuple(f"step {step} was done again with other bits" for step in outcome.picture.conflicts),
    )


def _errors(outcome: Outcome) -> Promise:
    raising = sorted({fault.WORD for fault, _ in outcome.made if fault.RAISES})
    ends = endings.endings(outcome)
    # An error by which something has to end is told in words when it is raised, and by an exit code thereafter.
    errors = [error for error in outcome.picture.errors if not (ends and _EXITED.fullmatch(error.strip()))]
    errors += [str(one.fields["error"]) for one in outcome.events if ends and one.name == "script.raised"]
    return Promise(
        says="nothing that happens makes the script raise",
        page="reference/failures.md",
        seen=f"{', '.join(raising)} makes it raise" if raising else "nothing was raised",
        broken=tuple(
            f"user code raised: {error.strip().splitlines()[-1]}"
            for error in errors
            if error.strip() and not raising and not any(one.explains(error) for one in ends)
        ),
        judged=not raising,
    )


def _made(outcome: Outcome) -> Promise:
    """Judge whether no fault was left out: a job that ends early leaves some out, and is what went wrong then."""
    ending = endings.of_job(outcome)
    missed = (*outcome.undone, *outcome.late, *outcome.unmet)
    done = f"{len(outcome.faults) - len(missed)} of {len(outcome.faults)}"
    if outcome.late:
        done = f"{done}; the job had ended before {', '.join(map(str, outcome.late))}"
    if outcome.unmet:
        done = f"{done}; no request met {', '.join(map(str, outcome.unmet))}"
    return Promise(
        says="every fault of the schedule comes to pass",
        page="guides/chaos.md",
        seen=done if ending is None else f"{done}, until the job had to end by {ending.made.fault}",
        broken=tuple(f"{fault}: its moment never came" for fault in outcome.undone) if ending is None else (),
    )


def _exits(outcome: Outcome) -> Promise:
    broken, well = [], 0
    taken = {name for view in outcome.picture.generations for name in (*view.nodes, *view.spares)}
    for name, code in outcome.exit_codes.items():
        if name in outcome.unwanted:
            if not code or name in taken:
                broken.append(f"{name}, which had to stay out, {'took part' if name in taken else 'ended with 0'}")
            continue
        # After SIGTERM torchrun ends with 1, whatever its workers return.
        fails = name in outcome.dismissed or endings.of_node(outcome, name) is not None
        if name not in outcome.killed and code != (endings.FAILED if fails else 0):
            broken.append(f"{name} ended with {'no exit code' if code is None else f'exit code {code}'}")
        elif name not in outcome.killed:
            well += 1
    return Promise(
        says="a node that nobody kills ends well",
        page="guides/cluster.md",
        seen=f"{well} of {len(outcome.exit_codes)} nodes, killed ones: {len(outcome.killed)}"
        + (f", turned away: {len(outcome.unwanted)}" if outcome.unwanted else ""),
        broken=tuple(broken),
    )


def _ending(outcome: Outcome, *, known: bool) -> Iterator[Promise]:
    """Judge whether the job came to its end. known: how many steps it has is not only what it made of them."""
    steps, picture, ending = outcome.setting.steps, outcome.picture, endings.of_job(outcome)
    whole = picture.step == steps
    broken = [] if whole else [f"the job ended after step {picture.step} of {steps}"]
    broken += [] if outcome.digest is not None else ["the job left no digest"]
    end = f"the digest of its state is {outcome.digest or 'not there'}"
    end = end if ending is None else f"it had to end by {ending.made.fault}"
    yield Promise(
        says=WHOLE,
        page="reference/failures.md",
        seen=f"{picture.step} of {steps if known else 'nobody knows how many'}; {end}",
        broken=tuple(broken) if ending is None else (),
        judged=ending is None and known,
    )
    newest = max(picture.checkpoints, default=0)
    saved = steps in picture.checkpoints
    missing = f"the run's last step, {steps}, is no checkpoint; the newest one is of step {newest}"
    yield Promise(
        says=SAVED,
        page="guides/checkpoints.md",
        seen=f"a checkpoint of step {newest}" if saved else "it has no store, or did not come to its last step",
        broken=(missing,) if whole and outcome.store and not saved and ending is None else (),
        judged=saved or bool(whole and outcome.store and ending is None),
    )
    yield Promise(
        says="every checkpoint that was committed can be restored",
        page="guides/checkpoints.md",
        seen=f"every byte of what is left of {len(picture.checkpoints)} checkpoints was read"
        if picture.checkpoints and not outcome.failure
        else f"of a job that was given up none of {len(picture.checkpoints)} was read"
        if picture.checkpoints
        else "there is none",
        broken=outcome.damage,
        judged=bool(picture.checkpoints) and not outcome.failure,
    )


def _alarms(outcome: Outcome, quiet: Outcome | None, all_known: bool) -> Promise:
    usual = {one.event for one in quiet.picture.accused} if quiet is not None else set()
    vague = sorted({fault.WORD for fault, _ in outcome.made if fault.ABOUT.spreads})
    why = ""
    if not all_known:
        why = UNKNOWN
    elif vague:
        why = f"of {', '.join(vague)} nothing says whose fault it is"
    wrong: dict[tuple[str, tuple[str, ...]], str] = {}
    accused = [one for one in outcome.picture.accused if one.event not in usual]
    excused = ", ".join(sorted(usual & {one.event for one in outcome.picture.accused}))
    for one in accused if not why else ():
        harmful = [done for done in outcome.injections if done.node and done.kind not in HARMLESS]
        hit = {done.node for done in harmful if done.at <= one.at + BEFORE}
        if not hit & {*one.nodes}:
            what = f"{one.event} named {_names(one.nodes)}, to which nothing had been done"
            wrong.setdefault((one.event, one.nodes), f"{what}: {one.detail}" if one.detail else what)
    named = sorted({f"{one.event} of {_names(one.nodes)}" for one in accused})
    return Promise(
        says="nobody is named as being at fault to whom nothing was done",
        page="reference/failures.md",
        seen=why
        or ("; ".join(named) or "nobody was named")
        + (f"; not judged, as somebody was named by it undisturbed too: {excused}" if excused else ""),
        broken=tuple(wrong.values()),
        judged=not why,
    )


def _same_bits(outcome: Outcome, quiet: Outcome | None) -> Promise:
    return Promise(
        says="whatever happens, the bits are those of a run that nothing happens to",
        page="explanation/same-bits.md",
        seen="it was not compared with an undisturbed run"
        if quiet is None
        else f"{len(outcome.picture.steps)} losses, their samples, and the digest of the state at the end"
        if endings.of_job(outcome) is None
        else f"{len(outcome.picture.steps)} losses and their samples, until the job had to end",
        broken=() if quiet is None else tuple(compare(outcome, quiet)),
        judged=quiet is not None,
    )


def _names(nodes: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(nodes)) or "nobody"


def compare(outcome: Outcome, quiet: Outcome) -> list[str]:
    """Return how two histories of one job differ in their bits, as far as it has to come; empty if they do not."""
    if quiet.digest is None:
        return [f"the undisturbed run failed: {quiet.failure or 'it left no digest'}"]
    differences = []
    for mine, theirs in zip(outcome.picture.steps, quiet.picture.steps, strict=False):
        if mine.loss != theirs.loss:
            differences.append(f"loss of step {mine.number} is {mine.loss}, undisturbed {theirs.loss}")
            break
        if mine.samples != theirs.samples or mine.sample_sum not in (theirs.sample_sum, None):
            differences.append(f"step {mine.number} consumed other samples than the undisturbed run")
            break
    if endings.of_job(outcome) is not None:
        return differences
    if len(outcome.picture.steps) != len(quiet.picture.steps):
        differences.append(f"{len(outcome.picture.steps)} steps, undisturbed {len(quiet.picture.steps)}")
    if outcome.digest != quiet.digest:
        differences.append(f"digest {outcome.digest}, undisturbed {quiet.digest}")
    return differences


def document(outcome: Outcome, verdict: Verdict) -> dict[str, Any]:
    """Return the outcome as the one JSON document that `elastic3d demo --json` prints."""
    return {
        "digest": outcome.digest,
        "losses": list(outcome.picture.losses),
        "generations": [
            {
                "number": view.number,
                "cause": view.cause,
                "nodes": list(view.nodes),
                "layout": {axis: {"cp": 1, **view.layout}.get(axis) for axis in ("pp", "dp", "cp", "tp", "zero")},
                "first_step": view.first_step,
                "steps_repeated": view.steps_repeated,
                "restored_from": view.restored_from,
                "seconds_to_first_step": view.seconds_to_first_step,
            }
            for view in outcome.picture.generations
        ],
        "samples": {
            "consumed": verdict.samples.consumed,
            "repeated": verdict.samples.repeated,
            "missing": verdict.samples.missing,
        },
        "same_bits": verdict.same_bits,
        "leftovers": list(outcome.leftovers),
    }
