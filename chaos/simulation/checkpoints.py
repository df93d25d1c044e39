"""A minimal checkpoint store: `latest` with a fence, as the format of checkpoints describes it, and `vetted`.

Where `vetted` may go is decided by the production code, from what each checkpoint says of those who made it. What has
to hold does not depend on it: since a checkpoint was made, an audit of its step or a later one has compared every node
that trained when it was made, and no rule refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random

from chaos.simulation.loop import Loop
from checkpointing.format import names, refs
from checkpointing.format.names import Save
from checkpointing.format.refs import Ref, Target, Verdict
from elastic3d.distrust import Distrust
from elastic3d.health import vetted
from elastic3d.membership.records import SavedStep

_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Who trained when a step was made, with the newest step that audits vouched for, and when that was."""

    by: Mapping[str, int]
    at: float


class Checkpoints:
    """A leader's number is swapped into `latest` before it commits; leaders with an older one are refused."""

    def __init__(self, loop: Loop, random: Random) -> None:
        self._loop, self._random = loop, random
        self._fence = 0
        self._newest = 0
        self._ref = Ref(generation=0)
        self._made: dict[Save, _Made] = {}
        self._live: tuple[int, Mapping[str, int]] = (0, {})
        self._audited: dict[str, list[tuple[float, int]]] = {}
        self.refused = 0
        self.committed: list[tuple[int, int]] = []
        self.violations: list[str] = []

    def made(self, saved: SavedStep, clean: Mapping[str, int], at: float) -> None:
        """A step is saved that nodes made at this time. clean: by node, the newest step that audits vouched for."""
        self._made[_save_of(saved)] = _Made(by=clean, at=at)

    def audited(self, number: int, clean: Mapping[str, int]) -> None:
        """All nodes that train in generation `number` agreed in an audit. clean: by node, the step."""
        for node, step in clean.items():
            self._audited.setdefault(node, []).append((self._loop.now, step))
        self._live = number, clean
        self._vet()

    def fence(self, number: int, rules: Iterable[Distrust] = ()) -> None:
        """Put up the fence of a generation, a moment later; with rules for states that nobody goes on from."""
        self._loop.later(self._random.uniform(0.005, 0.3), self._put_up, number, tuple(rules))

    def _put_up(self, number: int, rules: tuple[Distrust, ...]) -> None:
        if number >= self._fence:
            self._fence = self._newest = number
            self._ref = refs.distrusting_ref(refs.fenced_ref(self._ref, number, ""), rules, "")
        else:
            self.refused += 1

    def commit(self, number: int, saved: SavedStep) -> None:
        """Commit a step's checkpoint in generation `number`, a moment later."""
        self._loop.later(self._random.uniform(0.3, 1.0), self._commit, number, saved)

    def _commit(self, number: int, saved: SavedStep) -> None:
        if not self._takes(number):
            self.refused += 1
            return
        if number < self._newest:
            self.violations.append(
                f"at {self._loop.now:.3f}: generation {number} committed step {saved.step} after {self._newest}"
            )
        self.committed.append((number, saved.step))
        save = _save_of(saved)
        if refs.decide_commit(self._ref, save, number, "") is Verdict.MOVE:
            self._ref = refs.committed_ref(self._ref, save, number, _DIGEST, "")
            self._vet()

    def _vet(self) -> None:
        """Move `vetted` to the newest checkpoint that it may point to, as leaders do (`worker/checkpoints/vetting`)."""
        if not self._ref.committed:
            return
        number, live = self._live
        clean = vetted.clean_now(self._made[_parsed(self._ref.committed[0])].by, self._ref.made_in, live, number)
        for name in self._ref.committed:
            if self._ref.vetted is not None and self._ref.vetted.checkpoint == name:
                return
            save, target = _parsed(name), Target(checkpoint=name, record_digest=_DIGEST)
            made = self._made[save]
            if not vetted.vets(made.by, save.step, clean):
                continue
            if refs.decide_vetted(self._ref, self._ref.committed, target) is Verdict.MOVE:
                self._ref = replace(self._ref, vetted=target)
                self._check(save.step, made, refused=self._ref.distrusts(name))
                return

    def _check(self, step: int, made: _Made, *, refused: bool) -> None:
        wrong = [
            f"no audit has compared {node} since"
            for node in made.by
            if not any(at >= made.at and audited >= step for at, audited in reversed(self._audited.get(node, ())))
        ]
        for why in [*wrong, *(["a rule refuses it"] if refused else [])]:
            self.violations.append(f"at {self._loop.now:.3f}: the checkpoint of step {step} is vetted, and {why}")

    def _takes(self, number: int) -> bool:
        return number == self._fence


def _save_of(saved: SavedStep) -> Save:
    return Save(step=saved.step, made_in=saved.made_in, attempt=saved.attempt)


def _parsed(name: str) -> Save:
    parsed = names.parse_checkpoint(name)
    assert parsed is not None, "the ref holds names of checkpoints only"
    return parsed[0]
