"""One trial: a save whose processes are killed at failpoints, and the recovery afterwards."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from chaos.commits.invariants import misread
from chaos.failpoints.nursery import Ended, Nursery
from chaos.failpoints.store import Failpoint, When
from chaos.failpoints.work import Task, work
from checkpointing import Store, open_checkpoint, open_store, verify

WORLD = 4
LEADER = "leader"
RANKS = tuple(f"rank{rank}" for rank in range(WORLD))

OF_RANKS = (
    Failpoint(when=When.BEFORE, operation="put-pack"),
    Failpoint(when=When.DURING, operation="put-pack"),
    Failpoint(when=When.AFTER, operation="put-pack"),
    Failpoint(when=When.BEFORE, operation="create-manifest"),
    Failpoint(when=When.AFTER, operation="create-manifest"),
)
# The first swap of a leader is its fence, the second its commit.
OF_LEADERS = (
    Failpoint(when=When.BEFORE, operation="swap-latest"),
    Failpoint(when=When.AFTER, operation="swap-latest"),
    Failpoint(when=When.BEFORE, operation="get-manifest", count=2),
    Failpoint(when=When.AFTER, operation="size-pack", count=1),
    Failpoint(when=When.BEFORE, operation="create-record"),
    Failpoint(when=When.AFTER, operation="create-record"),
    Failpoint(when=When.BEFORE, operation="swap-latest", count=2),
    Failpoint(when=When.AFTER, operation="swap-latest", count=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Where which processes end, by `rank0`... and `leader`. certain: every failpoint has to be reached."""

    failpoints: Mapping[str, Failpoint]
    certain: bool = True
    world: int = WORLD

    def __str__(self) -> str:
        return " ".join(f"{who}@{point}" for who, point in self.failpoints.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a trial. problems: violations, empty if there are none. killed: how many processes."""

    problems: tuple[str, ...]
    killed: int


def draw(seed: int) -> Trial:
    """Return a random trial: one to three processes, each at any of its operations."""
    random = Random(f"failpoints {seed}")
    who = random.sample((*RANKS, LEADER, LEADER, LEADER), random.choice((1, 1, 2, 3)))
    return Trial(
        failpoints={
            name: Failpoint(
                when=random.choice(tuple(When)),
                operation="any",
                count=random.randint(1, 16 if name == LEADER else 5),
            )
            for name in sorted(set(who))
        },
        certain=False,
    )


def play(
    trial: Trial,
    crew: Nursery,
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    everybody: bool = True,
) -> Result:
    """Play a trial in an empty place; the save that is broken has a process for each rank and for its leader.

    Not `everybody`: only those that are killed have one, and not every object is verified at the end.

    Generation 1 saves and commits step 1. Then step 2 is saved, and its leader, already one of generation 2, commits,
    while processes end as the trial says. `latest` has to be one of the two steps, whole. Then generation 3 begins:
    it commits step 2, if need be after the ranks that were killed have saved it again; then it makes step 3.
    """
    return _Play(trial=trial, crew=crew, url=url, options=dict(options or {}), everybody=everybody).run()


@dataclass(slots=True, kw_only=True)
class _Play:
    trial: Trial
    crew: Nursery
    url: str
    options: dict[str, Any]
    everybody: bool
    problems: list[str] = field(default_factory=list)
    killed: int = 0

    def run(self) -> Result:
        open_store(self.url, options=self.options)
        self._expect("the first save", self._save(1, 1), "saved")
        first = self._lead(1, 1, 1)
        self._expect("the first commit", [first], first.said if first.status == 0 else "a checkpoint")
        self._break()
        # As every leader does: scratch files of killed processes are removed.
        store = open_store(self.url, options=self.options)
        committed = self._whole(store, "after the kill", (1, 2))
        if committed == 1:
            answer = self._lead(2, 1, 3)
            if answer.said == "Incomplete":
                self._expect("the repeated save", self._save(2, 1), "saved")
                answer = self._lead(2, 1, 3)
            self._expect("the next leader's commit", [answer], "000000000002.00000001.0000.00000003")
            self._whole(store, "after the next leader's commit", (2,))
        self._expect("the next save", self._save(3, 3), "saved")
        self._expect("its commit", [self._lead(3, 3, 3)], "000000000003.00000003.0000.00000003")
        self._expect("the old leader's commit", [self._lead(2, 1, 2)], "Fenced")
        self._whole(store, "at the end", (3,))
        if self.everybody:
            self.problems += [f"at the end: {finding}" for finding in verify(store)]
        return Result(problems=tuple(self.problems), killed=self.killed)

    def _break(self) -> None:
        points = {who: str(point) for who, point in self.trial.failpoints.items()}
        ranks = {
            name: self._task(2, 1, rank=rank, failpoint=points.get(name, ""))
            for rank, name in enumerate(RANKS[: self.trial.world])
        }
        leader = {LEADER: self._task(2, 1, generation=2, failpoint=points.get(LEADER, ""))}
        ended = self._in_processes(ranks) | self._in_processes(leader)
        for who, one in ended.items():
            self.killed += one.status == -signal.SIGKILL
            if one.status not in (0, -signal.SIGKILL):
                self.problems.append(f"{who} failed: {one.said}")
            elif self.trial.certain and who in points and one.status == 0:
                self.problems.append(f"{who} did not come to {points[who]}")

    def _in_processes(self, tasks: Mapping[str, Task]) -> dict[str, Ended]:
        """Run tasks at the same time, each in a process of its own, or only those that are killed."""
        ended = {who: _here(task) for who, task in tasks.items() if not (self.everybody or task.failpoint)}
        others = [who for who in tasks if who not in ended]
        return (
            ended | dict(zip(others, self.crew.run([tasks[who] for who in others]), strict=True)) if others else ended
        )

    def _save(self, step: int, made_in: int) -> list[Ended]:
        return [_here(self._task(step, made_in, rank=rank)) for rank in range(self.trial.world)]

    def _lead(self, step: int, made_in: int, generation: int) -> Ended:
        return _here(self._task(step, made_in, generation=generation))

    def _task(self, step: int, made_in: int, **more: Any) -> Task:
        return Task(url=self.url, options=self.options, step=step, made_in=made_in, world=self.trial.world, **more)

    def _expect(self, what: str, ended: list[Ended], said: str) -> None:
        self.problems += [f"{what}: {one.status} {one.said}" for one in ended if one != Ended(status=0, said=said)]

    def _whole(self, store: Store, when: str, steps: tuple[int, ...]) -> int:
        """Restore latest, and return its step; it has to be one of these, bit for bit."""
        checkpoint = open_checkpoint(store)
        wrong = misread(checkpoint)
        if wrong:
            self.problems.append(f"{when}: latest {checkpoint.name} {wrong}")
        if checkpoint.step not in steps:
            self.problems.append(f"{when}: latest is step {checkpoint.step}, not one of {steps}")
        return checkpoint.step


def _here(task: Task) -> Ended:
    """Run a task in this process, which nothing kills."""
    return Ended(status=0, said=work(task))
