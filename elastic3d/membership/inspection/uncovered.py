"""What nobody looks for in a job, in plain words: pure. Whoever reads a job's status is not to believe more than holds.

Each kind of fault has its line here as long as something of it goes unseen.
"""

from __future__ import annotations

from elastic3d.coverage import AuditCoverage
from elastic3d.membership.records import HealthFigures

UNCHECKED = 4
"""Most checks that are named as off: each rank may have its own."""

UPDATES = "an update that goes wrong once: in one step of 10, 1 MiB of what a rank updates is computed again elsewhere"


def uncovered(watch: HealthFigures) -> tuple[str, ...]:
    """Return what a job that is watched so does not find, the widest gap first."""
    lines = [] if watch.idle else ["ranks that stand still: health is off"]
    if not watch.audit:
        lines.append("devices that compute wrongly: audits are off")
    elif watch.coverage is not None:
        lines += _of_audits(watch.coverage)
    lines += watch.unchecked[:UNCHECKED]
    if len(watch.unchecked) > UNCHECKED:
        lines.append(f"{len(watch.unchecked) - UNCHECKED} more checks that are off: `check.off` in the events")
    if watch.at_rest:
        lines.append("a bit that changes once in memory, in state that was not looked at in that step")
        if not any(why.startswith("updates: ") for why in watch.unchecked):
            lines.append(UPDATES)
    else:
        lines.append("the optimizer's arithmetic, and state at rest in a device's memory")
    seen = watch.coverage if watch.audit else None
    if seen is not None and seen.every:
        lines += _of_exchanges(seen)
    elif seen is None or seen.off:
        lines.append("what is summed, gathered or sent between ranks")
    if not watch.slow_from:
        lines.append("nodes that are slow: nobody measures them")
    else:
        lines.append(f"nodes less than {watch.slow_from:g} times as slow as others, and links that are slow")
        lines.append("a node that is slow from the first step on, where no other node does the same work")
    return tuple(lines)


def _of_audits(coverage: AuditCoverage) -> list[str]:
    if coverage.off or not coverage.every:
        return [f"devices that compute wrongly: {coverage.off}"]
    lines = []
    once = 1 - coverage.pieces / coverage.every
    if once > 0:
        lines.append(f"a fault that strikes once in the {100 * once:.4g} % of the passes that nobody repeats")
    if coverage.every > 1:
        lines.append(
            f"a device that always errs, for up to {2 * coverage.every - 1} steps: the run goes back behind them then"
        )
    if coverage.nodes == 1:
        lines.append("faults that strike every time: each pass is repeated on its own node, which nobody contradicts")
    elif coverage.nodes == 2:
        lines.append("which of two nodes errs, where they differ again and both come to a product that is known")
    return lines


def _of_exchanges(coverage: AuditCoverage) -> list[str]:
    lines = []
    if coverage.every > 1:
        most = f"{coverage.every - 1} of {coverage.every} steps"
        lines.append(f"gradients and weights that change on their way between ranks, in {most}")
    twice = coverage.sums / coverage.every
    if twice < 1:
        lines.append(f"what adds up gradients wrongly, in {100 * (1 - twice):.4g} % of the sums")
    return lines
