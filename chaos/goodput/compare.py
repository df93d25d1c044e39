"""All policies over one trace, beside the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from chaos.goodput.costs import RecoveryCosts
from chaos.goodput.ledger import Account
from chaos.goodput.lives import Crowd
from chaos.goodput.oracle import oracle
from chaos.goodput.playing import Play
from chaos.goodput.production import Production
from chaos.goodput.replicas import Replicas
from chaos.goodput.restart import Restart
from chaos.goodput.step_times import Fastest, StepTimes
from elastic3d.planner import Costs
from elastic3d.values import Layout, ModelProfile


class Contender(StrEnum):
    """A policy: how a job lives with nodes that come and go."""

    ELASTIC3D = "elastic3d"
    """As shipped: gradients are added up in an order of their own, for the same bits in any layout."""
    FAST = "elastic3d-fast"
    """With `reduction="fast"`, the backend's own sums, as the peers have them."""
    RESTART = "restart"
    """Restarts from checkpoints only."""
    REPLICAS = "data-parallel-only"
    """Whole replicas come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and on what. request: what of the layout is fixed. leaf: micro-batches of a leaf, where sums
    are ordered. notice: seconds from an announcement to the end of a node. seed: of the machine's random delays.
    """

    profile: ModelProfile
    costs: Costs
    slots: int
    request: Layout
    recovery: RecoveryCosts
    leaf: int = 1
    notice: float = 120.0
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The oracle's account, and those of the policies, in the order in which they were asked for."""

    oracle: Account
    accounts: tuple[Account, ...]

    def goodput(self, account: Account) -> float:
        """Return the share of the oracle's steps that a policy made, 0 if the oracle made none."""
        return account.steps / self.oracle.steps if self.oracle.steps else 0.0


class Planned:
    """A job's layouts and steps, with both reductions; kept, they are planned once for many traces."""

    def __init__(self, job: Job) -> None:
        self.job, self.fastest = job, Fastest()
        self.fast, self.ordered = (
            StepTimes(
                replace(job.profile, reduction=reduction, leaf=leaf), job.costs, job.slots, job.request, self.fastest
            )
            for reduction, leaf in (("fast", 1), ("ordered", job.leaf))
        )

    def prepare(self, most: int, report: Callable[[str, float], None]) -> int:
        """Plan for every number of nodes up to the most; return the fewest that any layout fits.

        LayoutError, saying why, if none does.
        """
        for nodes in range(1, most + 1):
            self.fast.best(nodes)
            self.ordered.best(nodes)
            report("planning", nodes / most)
        return min(times.fewest(most) for times in (self.fast, self.ordered))


def compare(
    crowd: Crowd,
    planned: Planned,
    contenders: Sequence[Contender],
    report: Callable[[str, float], None] = lambda what, share: None,
) -> Comparison:
    """Play each policy over one trace; LayoutError if the model fits no number of nodes that the trace has.

    report: called with what is played and the share of the trace that has been.
    """
    job, fast, ordered = planned.job, planned.fast, planned.ordered
    enough = planned.prepare(crowd.most, report)

    def player(contender: Contender) -> Play:
        recovery, name = job.recovery, contender.value
        match contender:
            case Contender.ELASTIC3D | Contender.FAST:
                times = ordered if contender is Contender.ELASTIC3D else fast
                return Production(name, crowd, times, recovery, seed=job.seed, notice=job.notice, enough=enough)
            case Contender.RESTART:
                return Restart(name, crowd, fast, recovery, enough=enough)
            case Contender.REPLICAS:
                return Replicas.saving(name, crowd, fast, recovery, enough=enough)

    accounts = [player(contender).play(partial(report, contender.value)) for contender in contenders]
    return Comparison(oracle=oracle(crowd, planned.fastest), accounts=tuple(accounts))
