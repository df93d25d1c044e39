"""Losses instead of bits: what is judged of a job whose bits depend on its layout, within a tolerance.

The sums of `reduction="fast"` are added up in another order in another layout, and a script of one's own may give each
rank other samples. What such a job comes to is near to what the undisturbed one does, and not the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from chaos.history.follow import Step, as_step, distrusted, lineage
from chaos.judging import endings
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome
from elastic3d.errors import UsageError

NEAR = "whatever happens, each loss is that of a run that nothing happens to, within {:g} of it"
AGAIN = "a step that is made again has the same loss, within {:g} of it"


def check_tolerance(tolerance: float | None) -> None:
    """Raise UsageError where a tolerance is no share of a loss."""
    if tolerance is not None and not 0 < tolerance < 1:
        raise UsageError(f"--tolerance {tolerance:g}: give a share of each loss, above 0 and below 1, such as 1e-3")


def apart(loss: str, other: str) -> float:
    """Return by which share of the other one, as hex text, a loss differs from it; infinity where it is no share.

    A loss that is not finite is as far from any other one as can be.
    """
    mine, theirs = float.fromhex(loss), float.fromhex(other)
    if loss == other or mine == theirs or (math.isnan(mine) and math.isnan(theirs)):
        return 0.0
    share = abs(mine - theirs) / abs(theirs) if theirs else math.inf
    return math.inf if math.isnan(share) else share


def near_promise(outcome: Outcome, quiet: Outcome | None, tolerance: float) -> Promise:
    """Return whether each loss is near to that of the undisturbed run, and its steps are as many.

    A job that has to end need not make as many. Of a script that torchrun restarts, steps are compared of which both
    runs tell a loss.
    """
    says, page = NEAR.format(tolerance), "guides/chaos.md"
    if quiet is None:
        return Promise(says=says, page=page, seen="it was not compared with an undisturbed run", judged=False)
    mine, theirs = outcome.picture.steps, quiet.picture.steps
    resident = outcome.setting.resident
    broken = []
    if resident and quiet.digest is None:
        broken.append(f"the undisturbed run failed: {quiet.failure or 'it left no digest'}")
    elif resident and len(mine) != len(theirs) and endings.of_job(outcome) is None:
        broken.append(f"{len(mine)} steps, undisturbed {len(theirs)}")
    by_number = {step.number: step.loss for step in theirs}
    compared = [
        (apart(step.loss, by_number[step.number]), step)
        for step in mine
        if step.number in by_number and (resident or (_is_told(step.loss) and _is_told(by_number[step.number])))
    ]
    beyond = [one for one in compared if not one[0] <= tolerance]
    worst, at = max(compared, key=lambda one: one[0], default=(0.0, None))
    if beyond:
        share, first = beyond[0]
        text = f"loss of step {first.number} is {_told(first.loss)}, undisturbed {_told(by_number[first.number])}"
        more = f"; {len(beyond)} steps in all, the largest difference is {worst:.2g}" if len(beyond) > 1 else ""
        broken.append(f"{text}: {share:.2g} of it, and {tolerance:g} is tolerated{more}")
    seen = f"{len(compared)} losses, the largest difference is {worst:.2g}"
    seen += f", of step {at.number}" if at is not None and worst else ""
    return Promise(
        says=says,
        page=page,
        seen=seen if compared else "no loss was told by both runs",
        broken=tuple(broken),
        judged=bool(compared),
    )


def again_promise(outcome: Outcome, tolerance: float) -> Promise:
    """Return whether a step that was made again has a loss that is near to that of before."""
    committed = [as_step(event) for event in outcome.events if event.name == "step.committed"]

    def near(earlier: Step, later: Step) -> bool:
        return apart(later.loss, earlier.loss) <= tolerance

    _, conflicts = lineage(committed, distrusted(outcome.events), same=near)
    return Promise(
        says=AGAIN.format(tolerance),
        page="guides/chaos.md",
        seen="no step was made with two losses that are further apart",
        broken=tuple(f"step {step} was done again with another loss" for step in conflicts),
    )


def tells_losses(steps: Iterable[Step]) -> bool:
    """Return whether any step has a loss."""
    return any(_is_told(step.loss) for step in steps)


def _is_told(loss: str) -> bool:
    return not math.isnan(float.fromhex(loss))


def _told(loss: str) -> str:
    return f"{float.fromhex(loss):.6g}"
