"""The numbers a job's owner chooses, checked where they enter."""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How memberships are formed. All times in seconds.

    minimum, maximum: active nodes. lease: TTL of member keys; the last resort for noticing a death.
    grace: how long a lost lease may be cured after the TTL. first_gather: how long the first generation waits for
    more nodes after the newest came, unless `maximum` are there. gather: the same for joins to a running job.
    below_minimum: how long to wait with too few nodes before the job fails. orphan: how long a membership without any
    member of its predecessor waits. tries: generations ended by the user's own error, or by a dying trainer, without
    progress between them, before the job fails. beside: prepare planned changes beside the running trainers and switch
    at a step boundary; otherwise planned changes stop the workers at once.
    """

    minimum: int = 1
    maximum: int = 1
    lease: float = 3.0
    grace: float = 2.0
    first_gather: float = 3.0
    gather: float = 0.2
    below_minimum: float = 600.0
    orphan: float = 30.0
    tries: int = 3
    interrupted: float = 5.0
    prepare: float = 300.0
    beside: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigurationError(
                f"--nnodes={self.minimum}:{self.maximum}: the minimum must be at least 1 and at most the maximum"
            )
        if self.lease < 2:
            raise ConfigurationError(
                f"lease={self.lease:g}: etcd cannot keep leases below 2 s; choose at least 2 (default 3)"
            )
        for name in ("grace", "first_gather", "gather", "below_minimum", "orphan", "interrupted", "prepare"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name):g}: a time cannot be negative")
        if self.tries < 1:
            raise ConfigurationError(f"tries={self.tries}: at least 1")
