"""Checks that all ranks of a generation make the same call, where torch would wait for ever for those that do not.

The ranks meet in the store of their generation, so that this works on every backend, needs no process group of its own,
and also shows which ranks have ended. A rank that arrives at a call counts itself in, and the last to arrive lets all
go on.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import UnmatchedCollective, UsageError

FIRST_PAUSE = 0.0005
LONGEST_PAUSE = 0.1
"""Seconds between two checks whether all have come: at first, and during a long wait."""

RETURNED = "elastic3d/returned"


class AllRanks:
    """The ranks of one generation, as seen by one of them. store: the part of the store that belongs to the generation.

    If the store is out of reach, its host is lost: every method but `returned` then raises torch's error.
    """

    def __init__(self, store: Store, *, rank: int, world: int, clock: Clock = SYSTEM) -> None:
        self._store, self._rank, self._world, self._clock = store, rank, world, clock
        self._meetings, self._before = 0, ""

    def meet(self, call: str, *, patience: float) -> None:
        """Block until every rank has come to its next meeting, and for the same call.

        call: as the script writes it, for the error. patience: seconds that the others may take. UsageError if one of
        them has already returned from `main`, or does not come.
        """
        self._meetings += 1
        before, here = self._before, f"elastic3d/{self._meetings}/{call}"
        self._before = here
        if self._store.add(f"{here}/arrived", 1) == self._world:
            self._store.set(f"{here}/all", "")
            # All ranks have left the previous meeting; its key is deleted, since an evaluation makes very many.
            for end in ("arrived", "all") if before else ():
                self._store.delete_key(f"{before}/{end}")
            return
        until, pause = self._clock.monotonic() + patience, FIRST_PAUSE
        while not self._store.check([f"{here}/all"]):
            if self._store.check([RETURNED]):
                raise UsageError(
                    f"{call} was called on rank {self._rank} when main had returned on rank {self._returned()[0]} "
                    f"already. {_WHAT_TO_DO}"
                )
            if self._clock.monotonic() > until:
                raise UsageError(
                    f"{call} was called on rank {self._rank}, and not on every rank within {patience:g} s: the others "
                    f"would be waited for for ever. {_WHAT_TO_DO}"
                )
            self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def say_returned(self, step: int) -> None:
        """Let the others know that `main` has returned here after so many steps, and makes no further call."""
        self._store.set(RETURNED, f"{self._rank} {step}")

    def returned(self) -> tuple[int, int] | None:
        """Return a rank whose `main` has returned, and after how many steps.

        None if there is none, or the store can no longer be asked.
        """
        try:
            return self._returned() if self._store.check([RETURNED]) else None
        except dist.DistError:
            return None

    def _returned(self) -> tuple[int, int]:
        rank, step = map(int, self._store.get(RETURNED).split())
        return rank, step


def unmatched(rank: int, returned: int, step: int) -> UnmatchedCollective:
    """Return the error of a collective that failed on `rank`, when `main` had returned on another after `step`."""
    return UnmatchedCollective(
        f"a collective on rank {rank} failed when main had returned on rank {returned} after step {step} already: what "
        "ran here needs that rank too, or another rank was lost in this moment. To end a loop early, as by the clock, "
        f"call run.stop: all ranks then leave it after the same step. {_WHAT_TO_DO}"
    )


_WHAT_TO_DO = (
    "The ranks compute and gather together: make such calls on every rank alike, as often and in the same order, not "
    "under `if run.rank == 0`; or evaluate by run.evaluate, or from a checkpoint in another program (elastic3d ckpt "
    "export)"
)
