"""The work of one process of a trial: a rank's save, or a leader's fence and commit. Input and output are JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from chaos.commits.contents import facts, pieces
from chaos.failpoints.store import FailingStore, parse_failpoint
from checkpointing import commit, fence, open_checkpoint, open_store, save_rank
from checkpointing.errors import CommitRefused, NoCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One process's work: save step `step` as rank `rank`, or as the leader (rank -1) fence, then commit that save.

    generation: the leader's. failpoint: text, "" for none.
    """

    url: str
    step: int
    made_in: int
    world: int
    rank: int = -1
    generation: int = 0
    failpoint: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def work(task: Task) -> str:
    """Do it; return `saved`, the checkpoint's name, or why the commit was refused."""
    # Not probed: a trial opens the place many times, and failpoints count only later operations.
    plain = open_store(task.url, write=False, options=task.options)
    store = FailingStore(plain, parse_failpoint(task.failpoint) if task.failpoint else None)
    if task.rank >= 0:
        try:
            parent = open_checkpoint(plain)
        except NoCheckpoint:
            parent = None
        save_rank(
            store,
            step=task.step,
            made_in=task.made_in,
            attempt=0,
            rank=task.rank,
            world=task.world,
            pieces=pieces(task.made_in, task.step, task.rank, task.world),
            facts=facts(task.made_in, task.step),
            parent=parent,
        )
        return "saved"
    try:
        fence(store, task.generation)
        done = commit(
            store,
            step=task.step,
            made_in=task.made_in,
            attempt=0,
            committed_in=task.generation,
            world=task.world,
        )
    except CommitRefused as error:
        return type(error).__name__
    return done.checkpoint
