"""What a script asks for: `islands=` of `elastic3d.run`."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from checkpointing.errors import StoreUnfit
from checkpointing.stores.address import parse, redacted
from elastic3d.errors import UsageError
from elastic3d.quantities import rate, some_seconds, whole

AVERAGE, NESTEROV = "average", "nesterov"
LR, MOMENTUM = 0.7, 0.9
"""Of DiLoCo's outer optimizer (Douillard et al., arXiv:2311.08105)."""

MIXING = 0.5
"""Of streaming DiLoCo with overlap (Douillard et al., arXiv:2501.18512, alpha)."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")
_ISLAND = re.compile(rf"{_NAME.pattern}\.[0-9]+")
_OF = "elastic3d.Islands"


@dataclass(frozen=True, slots=True, kw_only=True)
class Islands:
    """One of several jobs that train apart, and merge what they learned every so many steps.

        elastic3d.run(main, store="s3://here/gpt", islands=elastic3d.Islands(store="s3://between/gpt", every=500))

    Every island runs the same script with the same values here, but for its name. UsageError for values that make no
    sense.
    """

    store: str | os.PathLike[str]
    """URL or path that all islands can read and write, with conditional writes: there they find each other, and there
    the deltas go. Not that of the checkpoints, which each island has for itself."""
    every: int
    """Inner steps from one outer step to the next: H. With `fragments`, those of each fragment."""
    name: str = ""
    """The island's name, which no other has; "", the default, for the job's rendezvous id."""
    outer: str = NESTEROV
    """The outer optimizer: "nesterov", the default, is DiLoCo's; "average" takes the mean of the islands' parameters,
    which is local SGD."""
    lr: float | None = None
    """Learning rate of "nesterov"; None, the default, for 0.7."""
    momentum: float | None = None
    """Momentum of "nesterov"; None, the default, for 0.9."""
    minimum: int = 1
    """Islands that must be there to begin, and whose deltas must be there for an outer step; 1 by default. With fewer
    the others wait."""
    patience: float | str = "5m"
    """How long an island waits for the delta of another one, once its own is written, before the outer step is sealed
    without it: in seconds or as "5m", the default. More than the difference between islands' paces, and than a recovery
    within one takes."""
    longest: float | str = "24h"
    """How long an island waits at all, for as many islands as `minimum` says, to be admitted, or for the store, before
    its job ends with an error: "24h" by default."""
    keep: int | None = 4
    """Outer steps whose deltas are kept behind the newest outer parameters, for islands that go on from an older state
    of their own; 4 by default. None keeps all, so that the run can be replayed from the record."""
    key: str | os.PathLike[str] | None = None
    """File with the key that encrypts what is exchanged; None, the default, for no encryption."""
    fragments: int = 1
    """Parts of the model that are merged one after the other, each `every` steps, the outer steps being `every /
    fragments` apart (streaming DiLoCo, arXiv:2501.18512): as many bytes, a part at a time. 1, the default, for all at
    once."""
    overlap: int = 0
    """Inner steps that are made while an outer step's deltas are exchanged in the background: they are those of so many
    steps before it. Fewer than from one outer step to the next, `every / fragments`; 0, the default, for none, where
    islands wait for the exchange."""
    mixing: float | None = None
    """With `overlap`, the share of its own parameters that an island keeps at an outer step, the rest being the outer
    ones (alpha of streaming DiLoCo): None, the default, for 0.5. With 0, what it learned in the `overlap` steps is
    dropped."""
    max_bandwidth: int | str | None = None
    """What an island may upload to the store, all its ranks together, in bytes a second or as "20MB/s"; None, the
    default, for no limit."""
    replay: str = ""
    """An island of a run that is over, or goes on, such as "east.1", to be trained once more: each of its deltas has to
    have the bits that were merged. Nothing is written. "", the default, for an island that trains."""

    def __post_init__(self) -> None:
        if not isinstance(self.store, str | os.PathLike) or not os.fspath(self.store):
            raise UsageError(f"{_OF}(store={self.store!r}): give a URL such as s3://bucket/islands, or a path")
        try:
            parse(self.url)
        except StoreUnfit as error:
            raise UsageError(f"{_OF}(store={redacted(self.url)!r}): {error}") from error
        for name, least in (("every", 1), ("minimum", 1), ("fragments", 1)):
            whole(getattr(self, name), name, least, _OF)
        if self.keep is not None:
            whole(self.keep, "keep", 1, _OF)
        if not isinstance(self.name, str) or (self.name and not _NAME.fullmatch(self.name)):
            raise UsageError(f"{_OF}(name={self.name!r}): take letters, digits, _ and -, at most 60")
        if not isinstance(self.replay, str) or (self.replay and not _ISLAND.fullmatch(self.replay)):
            raise UsageError(f"{_OF}(replay={self.replay!r}): give an island as the records name it, such as 'east.1'")
        if self.outer not in (AVERAGE, NESTEROV):
            raise UsageError(f"{_OF}(outer={self.outer!r}): give {NESTEROV!r} or {AVERAGE!r}")
        for name, value, below in (("lr", self.lr, math.inf), ("momentum", self.momentum, 1.0)):
            if value is None:
                continue
            if self.outer == AVERAGE:
                raise UsageError(f"{_OF}(outer={AVERAGE!r}, {name}={value!r}): the mean has no {name}; leave it out")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < below or (name == "lr" and not value):
                raise UsageError(
                    f"{_OF}({name}={value!r}): give a number {'above 0' if name == 'lr' else 'from 0 on, below 1'}"
                )
        if self.every % self.fragments:
            raise UsageError(
                f"{_OF}(every={self.every}, fragments={self.fragments}): fragments divide every, so that the outer "
                "steps are equally far apart"
            )
        whole(self.overlap, "overlap", 0, _OF)
        if self.overlap >= self.period:
            raise UsageError(
                f"{_OF}(overlap={self.overlap}, every={self.every}, fragments={self.fragments}): an exchange has to "
                f"end before the next one begins, {self.period} inner steps later (every / fragments); take fewer than "
                f"{self.period} for overlap, or a larger every"
            )
        self._check_mixing()
        if self.max_bandwidth is not None:
            rate(self.max_bandwidth, f"{_OF}: max_bandwidth")
        some_seconds(self.patience, f"{_OF}: patience")
        some_seconds(self.longest, f"{_OF}: longest")
        if self.key is not None and not isinstance(self.key, str | os.PathLike):
            raise UsageError(f"{_OF}(key={self.key!r}): give a path")

    def _check_mixing(self) -> None:
        if self.mixing is None:
            return
        if not self.overlap:
            raise UsageError(
                f"{_OF}(mixing={self.mixing!r}): without overlap an island has learned nothing since it sent its "
                "delta; leave it out, or give overlap="
            )
        number = isinstance(self.mixing, int | float) and not isinstance(self.mixing, bool)
        if not number or not 0 <= self.mixing < 1:
            raise UsageError(f"{_OF}(mixing={self.mixing!r}): give a number from 0 on, below 1")

    @property
    def url(self) -> str:
        """The store's URL."""
        return os.fspath(self.store)

    @property
    def period(self) -> int:
        """Inner steps from one outer step to the next, of whatever fragment."""
        return self.every // self.fragments

    @property
    def own_share(self) -> float:
        """Share of its own parameters that an island keeps at an outer step."""
        if not self.overlap:
            return 0.0
        return MIXING if self.mixing is None else float(self.mixing)

    @property
    def rates(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer optimizer."""
        if self.outer == AVERAGE:
            return 1.0, 0.0
        return LR if self.lr is None else float(self.lr), MOMENTUM if self.momentum is None else float(self.momentum)

    def named(self, run_id: str) -> str:
        """Return the island's name in the job of a rendezvous id; UsageError where that is no name."""
        if not self.name and not _NAME.fullmatch(run_id):
            raise UsageError(
                f"{_OF}: the rendezvous id {run_id!r} is no name of an island; give {_OF}(name=...), of letters, "
                "digits, _ and -, at most 60"
            )
        return self.name or run_id
