"""The rows of the score card: kinds of faults, and controls in which nothing is at fault.

What the card does not try, since no verdict comes of it, has tests of its own: bits that change in snapshots, which
their copies mend without a word, deaths during a hearing, a change for the sake of slow nodes and a rollback. More
controls than these are in `chaos.score.controls`.

`devicememory` proves that torch.OutOfMemoryError in a pass of a device is told as its device's, that the job goes on in
a layout that is predicted to need less, once the memory of the trainers before is back, and that no bit differs. The
device is emulated and the error is raised once, by the script: it does not prove that a real device's allocator has
room after that, nor that fragments, caches and libraries' own memory are as predicted.

`slowdevice` is `slow` on that device, whose steps are measured by its own marks. What makes it slow is its host: it
proves that marks make rows, that all ranks' rows agree, and that the node is named; no kernel was slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from chaos.faults import catalogue
from elastic3d.health.hearing import Compared, Finding
from elastic3d.health.slow_node import SlowKind
from elastic3d.health.stuck import Fault


class Culprit(StrEnum):
    """Whom the first verdict has to name."""

    NODE = "node"  # the one at fault, and no other
    PAIR = "pair"  # that one, or its rank and one other
    EDGES = "edges"  # its rank, among those that wait for each other
    LIARS = "liars"  # it, and nobody but the other liar besides
    SAMPLES = "samples"  # no node, and the samples that are to be left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A row of the card. faults: what it may be called. bar: seconds to a verdict, 0 for a control, which has none.

    hogs: processes per processor that compute beside the job. together: some ranks have to do the same, as dp columns
    do. between_two: no more than two may, since in a larger group nothing says which of its connections is at fault.
    lies: a device computes wrongly; the job is audited in each step, and `steps` more may be made until it is found.
    hung: files that never answer have to be there. alone: no other fault happens in its job. options: of the script,
    besides the fault. from_step: the first step at which it can be seen. data: it is of samples, and the job has to end
    with the bits of one that leaves them out from its beginning. lasts: it goes on in a job of `LONG` steps, so that
    what is slow can be found. factor: how many times as long a node's blocks take. share: which part of the processor
    time that its trainers would have they may use. late: seconds by which all that its node sends and gets is late,
    from then on, in a job of `LINKED` steps on nodes that are hosts of their own. starts_again: all trainers start
    again for it, with the same nodes. joins: it is of a node that comes while steps are made. rechecked: it is in a
    step of which updates are computed again elsewhere. audits: it is in a pass that a rank makes for an audit.
    injector: what the script calls it, its name by default. of: whom the script takes, by default the trial's rank.
    """

    faults: tuple[str, ...] = ()
    bar: float = 0.0
    hogs: int = 0
    culprit: Culprit = Culprit.NODE
    together: bool = False
    between_two: bool = False
    lies: bool = False
    steps: int = 0
    hung: bool = False
    alone: bool = False
    options: tuple[str, ...] = ()
    from_step: int = 4
    data: bool = False
    lasts: bool = False
    factor: float = 0.0
    share: float = 0.0
    late: float = 0.0
    starts_again: bool = False
    joins: bool = False
    rechecked: bool = False
    audits: bool = False
    injector: str = ""
    of: str = ""

    @property
    def begins(self) -> int:
        """The step after which it begins, 0 for one that is drawn."""
        return KNOWN if self.lasts or self.late else SETTLED if self.joins else 0

    @property
    def control(self) -> bool:
        """Whether nothing is at fault."""
        return not self.faults


ALTERED = "altered"
"""What the card calls bits that change in memory."""

SHORT = "out of memory"
"""What it calls memory that runs out on a rank."""

SLOW_LINK = "slow link"
"""What it calls a node whose connections are slow: `Fault.LINK` is one that passes nothing."""

NOT_FINITE, SPIKED = "not finite", "spiked"
"""What it calls samples that bring such numbers, and a loss that jumped up."""

DISPUTED: Mapping[str, str] = {
    Compared.TRANSIT: "altered on its way",
    Compared.WEIGHTS: "gathered otherwise",
    Compared.SUM: "added up wrongly",
}
"""What it calls that which an audit finds of what ranks exchange; of passes, it is called as a hearing does."""

SPLIT, MISCALCULATED, UNFIT = "split vote", "wrong update", "failed exam"
"""What it calls a rank that leaves a vote otherwise, one whose update is wrong, and a node that is not let in."""

SHOWS, BACK = 3, 10
"""In how many steps a spike shows, and how many steps the run goes back for it."""

SELDOM = 19
"""Steps within which pieces of updates are computed again once, at least."""

_AUDITED = ("--audit=100%",)
SETTLED, LONG, WORK = 48, 640, 16
"""Steps after which a node joins, those of a job with something that lasts, and products of matrices in each block.

They make 80 s on two processors, of steps of an eighth of a second, where nothing is slow."""
LINKED = 256
"""Steps of a job in which a node's connections become slow: from then on they take four times as long."""
KNOWN = 160
"""Steps after which what lasts begins, 20 s. In a few seconds it cannot be known what a stage of one's own takes."""
EXAMINED = 180
"""Steps within which a node that joins has come and was examined."""
_LONG = (f"--work={WORK}",)
_ASTRAY = (Fault.LEFT, Fault.MISMATCH)


def _bar(word: str) -> float:
    """Return the bar that the catalogue has for a fault."""
    return catalogue.KINDS[word].ABOUT.bar


KINDS: Mapping[str, Kind] = {
    "stop": Kind(faults=(Fault.STOPPED,), bar=_bar("freeze")),
    "gil": Kind(faults=(Fault.HELD,), bar=_bar("gil")),
    "lock": Kind(faults=(Fault.IDLE,), bar=_bar("lock")),
    "blocked": Kind(faults=(Fault.BLOCKED,), bar=_bar("blocked"), hung=True),
    "blackhole": Kind(faults=(Fault.LINK,), bar=_bar("blackhole"), culprit=Culprit.PAIR, between_two=True),
    "spin": Kind(faults=(Fault.SPINNING,), bar=_bar("spin")),
    "loader": Kind(faults=(Fault.LOADER,), bar=_bar("loader")),
    "skip": Kind(faults=_ASTRAY, bar=_bar("skip"), together=True),
    "order": Kind(faults=_ASTRAY, bar=_bar("order")),
    "shape": Kind(faults=_ASTRAY, bar=_bar("shape")),
    "dtype": Kind(faults=_ASTRAY, bar=_bar("dtype")),
    "deadlock": Kind(faults=(Fault.DEADLOCK, Fault.LEFT), bar=_bar("deadlock"), culprit=Culprit.EDGES, together=True),
    "flip": Kind(faults=(Finding.TRANSIENT,), bar=_bar("flip"), lies=True, options=_AUDITED),
    "forward": Kind(faults=(Finding.TRANSIENT,), bar=_bar("forward"), lies=True, options=_AUDITED),
    "backward": Kind(faults=(Finding.TRANSIENT,), bar=_bar("backward"), lies=True, options=_AUDITED),
    "auditor": Kind(
        faults=(Finding.TRANSIENT,), bar=_bar("flip"), lies=True, options=_AUDITED, audits=True, injector="flip"
    ),
    "sticky": Kind(faults=(Finding.PERSISTENT,), bar=_bar("sticky"), lies=True, steps=1, options=_AUDITED),
    "leader": Kind(
        faults=(Finding.PERSISTENT,),
        bar=_bar("sticky"),
        lies=True,
        steps=1,
        options=_AUDITED,
        injector="sticky",
        of="leader",
    ),
    "liars": Kind(
        faults=(Finding.PERSISTENT,), bar=_bar("liars"), culprit=Culprit.LIARS, lies=True, steps=1, options=_AUDITED
    ),
    "nandevice": Kind(faults=(Finding.PERSISTENT,), bar=_bar("nandevice"), lies=True, options=("--numerics=skip",)),
    "wire": Kind(
        faults=(DISPUTED[Compared.TRANSIT],), bar=_bar("wire"), culprit=Culprit.PAIR, lies=True, options=_AUDITED
    ),
    "gather": Kind(faults=(DISPUTED[Compared.WEIGHTS],), bar=_bar("gather"), lies=True, options=_AUDITED),
    "fold": Kind(faults=(DISPUTED[Compared.SUM],), bar=_bar("fold"), lies=True, options=_AUDITED),
    "vote": Kind(faults=(SPLIT,), bar=_bar("vote"), lies=True, starts_again=True),
    "update": Kind(faults=(MISCALCULATED,), bar=_bar("update"), lies=True, starts_again=True, rechecked=True),
    "updates": Kind(faults=(MISCALCULATED,), bar=_bar("update"), lies=True, steps=SELDOM),
    "newcomer": Kind(
        faults=(UNFIT,),
        bar=_bar("sticky"),
        lies=True,
        steps=EXAMINED,
        options=(*_AUDITED, *_LONG),
        joins=True,
        injector="sticky",
        of="newcomer",
    ),
    "nan": Kind(
        faults=(NOT_FINITE,), bar=5.0, culprit=Culprit.SAMPLES, alone=True, data=True, options=("--numerics=skip",)
    ),
    "spike": Kind(
        faults=(SPIKED,),
        bar=5.0,
        culprit=Culprit.SAMPLES,
        alone=True,
        data=True,
        options=(f"--rollback-steps={BACK}",),
        from_step=40,
    ),
    "rest": Kind(faults=(ALTERED,), bar=_bar("rest"), alone=True, starts_again=True),
    "memory": Kind(faults=(SHORT,), bar=_bar("memory"), alone=True),
    "devicememory": Kind(faults=(SHORT,), bar=_bar("devicememory"), alone=True, options=("--device=emulated",)),
    "slow": Kind(faults=(SlowKind.COMPUTE,), bar=_bar("slow"), lasts=True, options=_LONG, factor=1.3),
    "slowdevice": Kind(
        faults=(SlowKind.COMPUTE,),
        bar=_bar("slow"),
        lasts=True,
        options=(*_LONG, "--device=emulated"),
        factor=1.3,
    ),
    "quota": Kind(faults=(SlowKind.COMPUTE,), bar=_bar("throttle"), lasts=True, options=_LONG, share=0.4),
    "link": Kind(faults=(SLOW_LINK,), bar=_bar("slow"), options=_LONG, late=0.01),
    "stall": Kind(),
    "oversubscribed": Kind(hogs=3),
    "tenth": Kind(lasts=True, options=_LONG, factor=1.1),
    "busy": Kind(lasts=True, options=_LONG, hogs=3),
}
