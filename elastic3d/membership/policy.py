"""The numbers a job's owner chooses, checked where they enter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How memberships are formed. All times in seconds."""

    minimum: int = 1
    """Fewest active nodes."""
    maximum: int = 1
    """Most active nodes; more are spares."""
    lease: float = 3.0
    """TTL of member keys: the last resort for noticing a death."""
    grace: float = 2.0
    """How long a lost lease may be cured after the TTL."""
    first_gather: float = 3.0
    """How long the first generation waits for more nodes after the newest came, unless `maximum` are there."""
    gather: float = 0.2
    """The same for nodes that join a running job."""
    below_minimum: float = 600.0
    """How long to wait with too few nodes before the job fails."""
    orphan: float = 30.0
    """How long a membership without any member of its predecessor waits; and how long a node that lost its lease, but
    is heard by its neighbours, may take to register again."""
    tries: int = 3
    """Generations ended by the user's own error, or by a dying trainer, without progress between them, before the job
    fails."""
    peer_lost: float = 5.0
    """How long trainers that lost a peer wait for somebody to be declared dead before the generation ends anyway."""
    prepare: float = 300.0
    """How long nodes may take to build their trainers beside the running ones before the change is given up."""
    beside: bool = True
    """Prepare planned changes beside the running trainers and switch at a step boundary; otherwise planned changes stop
    the workers at once."""
    multiple_of: int = 1
    """Only multiples of this many nodes may be active."""
    counts: tuple[int, ...] = ()
    """Only these numbers of nodes may be active; () for any."""
    doubt: float = 1.1
    """How long an incarnation that one witness does not hear may take to answer through etcd; longer than the second
    after which a call to etcd that got no answer is made again."""
    confirm: float = 0.2
    """How long a silence that two witnesses report may still turn out to be a pause."""
    budget: int = 60
    """Re-formings in an hour after which newcomers wait, 0 for no bound; losses always re-form."""
    damping: float = 5.0
    """The longest wait for more losses in a storm of them."""
    flaps: int = 3
    """Losses of one machine within `flap_memory` after which it is kept out; 0 for never."""
    flap_memory: float = 3600.0
    """How long a loss is remembered, and the longest `quarantine`."""
    quarantine: float = 60.0
    """How long such a machine is kept out at first; twice as long each time after, up to `flap_memory`."""
    reach_again: float = 60.0
    """How long two nodes that could not connect to each other must have been able to before both may be active
    again."""

    balance: bool = True
    """Whether anything is done about slow nodes; otherwise it is only reported what could be."""
    change_cost: float = 30.0
    """What a planned change is taken to cost, in time in which no step is made, until one was measured."""

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigurationError(
                f"--nnodes={self.minimum}:{self.maximum}: the minimum must be at least 1 and at most the maximum"
            )
        if self.lease < 2:
            raise ConfigurationError(
                f"--rdzv-conf=lease={self.lease:g}: etcd cannot keep leases below 2 s; choose at least 2 (default 3)"
            )
        for name in (
            "grace",
            "first_gather",
            "gather",
            "below_minimum",
            "orphan",
            "peer_lost",
            "prepare",
            "doubt",
            "confirm",
            "damping",
            "reach_again",
            "change_cost",
        ):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name):g}: a time cannot be negative")
        if self.tries < 1:
            raise ConfigurationError(
                f"--rdzv-conf=tries={self.tries}: give at least 1, by which the first error ends the job"
            )
        if self.multiple_of < 1:
            raise ConfigurationError(
                f"--rdzv-conf=multiple_of={self.multiple_of}: at least 1; 1 allows every number of nodes"
            )
        outside = [count for count in self.counts if not self.minimum <= count <= self.maximum]
        if outside:
            raise ConfigurationError(
                f"--rdzv-conf=counts={'/'.join(map(str, self.counts))}: {', '.join(map(str, outside))} not within "
                f"--nnodes={self.minimum}:{self.maximum}; change one of the two"
            )
        if not self.allowed(self.maximum):
            raise ConfigurationError(
                f"--nnodes={self.minimum}:{self.maximum} holds no number of nodes that is allowed ({self.counting()}): "
                "no membership could ever be formed; widen --nnodes, or change multiple_of or counts"
            )
        if self.budget < 0 or self.flaps < 0:
            raise ConfigurationError(
                f"budget={self.budget}, flaps={self.flaps}: neither can be negative; 0 turns the one's bound and the "
                "other's quarantine off"
            )
        if self.flaps and not 0 < self.quarantine <= self.flap_memory:
            raise ConfigurationError(
                f"--rdzv-conf=quarantine={self.quarantine:g}, flap_memory={self.flap_memory:g}: a quarantine must last "
                "some time and end before what led to it is forgotten; lower quarantine, raise flap_memory, or give "
                "flaps=0"
            )

    def allowed(self, nodes: int) -> int:
        """Return the largest allowed number of active nodes that `nodes` nodes can provide, 0 for none."""
        numbers = self.numbers(nodes)
        return numbers[-1] if numbers else 0

    def numbers(self, nodes: int) -> Sequence[int]:
        """Return all allowed numbers of active nodes that `nodes` nodes can provide, the smallest first."""
        nodes = min(nodes, self.maximum)
        if self.counts:
            return tuple(sorted(c for c in self.counts if self.minimum <= c <= nodes and c % self.multiple_of == 0))
        return range(-(-self.minimum // self.multiple_of) * self.multiple_of, nodes + 1, self.multiple_of)

    def counting(self) -> str:
        """Return in words how many nodes may be active."""
        some = f"the numbers allowed are {', '.join(map(str, sorted(self.counts)))}" if self.counts else ""
        many = f"only multiples of {self.multiple_of} are allowed" if self.multiple_of > 1 else ""
        return " and ".join(part for part in (f"the minimum is {self.minimum}", some, many) if part)

    def kept_out(self, losses: int) -> float:
        """Return the seconds for which a machine is kept out after this many losses."""
        return min(self.quarantine * 2.0 ** min(max(losses - self.flaps, 0), 60), self.flap_memory)
