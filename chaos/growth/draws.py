"""Which fault a soak makes next: drawn by seed, from those that leave the job alive, one after another without an end.

The first node is never taken: what it runs lives as long as the job. What is drawn depends on the faults before it
alone, never on how far the job is with its recovery.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from chaos.faults.catalogue import KINDS
from chaos.faults.etcd import EtcdCompact, EtcdPause
from chaos.faults.fault import Fault, node_name
from chaos.faults.moment import When
from chaos.faults.orders import Drain, Join, Terminate
from chaos.faults.process import Kill, KillKeeper, KillTemplate, KillTrainer, Pause
from chaos.machine.processes import Part
from elastic3d.errors import UsageError
from elastic3d.nearest import nearest

_LOSING = (Kill, KillKeeper, Drain, Terminate)
_STAYING = (KillTrainer, KillTemplate, Pause)
_OF_ETCD = (EtcdPause, EtcdCompact)
WORDS = tuple(word for word, kind in KINDS.items() if kind in (Join, *_LOSING, *_STAYING, *_OF_ETCD))
"""Faults that a soak can make: a job lives on after any of them, whatever came before."""
DEFAULT = ("kill-trainer", "kill-template", "kill", "drain", "join", "pause", "etcd-pause")
AWAY = 2.0
"""Seconds for which etcd is paused."""


def check_words(words: Sequence[str], nodes: int) -> None:
    """Raise UsageError for a word that is no fault of a soak, and for those that cannot happen to so many nodes."""
    for word in words:
        if word not in WORDS:
            raise UsageError(f"--faults {word!r}: a soak makes {', '.join(WORDS)}{nearest(word, WORDS)}")
    if not any(KINDS[word] is not Join for word in words):
        raise UsageError("--faults: a node can join only where one was lost; give another fault as well")
    if nodes < 2 and any(KINDS[word] in _LOSING for word in words):
        raise UsageError("--nodes 1: the first node is never lost; give 2 or more, or faults that take no node")


class Draws:
    """The endless list of faults. nodes: at the beginning, and at most. words: as `check_words` has let through."""

    def __init__(self, seed: int, words: Sequence[str], nodes: int) -> None:
        self._chance = random.Random(f"soak {seed}")
        self._words, self._nodes = tuple(dict.fromkeys(words)), nodes
        self._alive = [node_name(number) for number in range(nodes)]
        self._next = nodes

    def take_back(self, fault: Fault) -> None:
        """Take note that a fault that was drawn is not made: its node is still there."""
        if isinstance(fault, _LOSING):
            self._alive.append(fault.node)

    def draw(self, step: int) -> Fault:
        """Return the next fault, to be made at `step`."""
        when = When(step=step)
        losing = [word for word in self._words if KINDS[word] in _LOSING] if len(self._alive) > 1 else []
        staying = [word for word in self._words if KINDS[word] in (*_STAYING, *_OF_ETCD)]
        # Whoever takes nodes away also brings them back, or nobody would be left to take.
        joining = ["join"] if len(self._alive) < self._nodes else []
        word = self._chance.choice([*losing, *staying, *joining])
        kind = KINDS[word]
        if kind is Join:
            self._alive.append(node_name(self._next))
            self._next += 1
            return Join(when=when)
        if kind is Pause:
            part = self._chance.choice((Part.KEEPERS, Part.TRAINERS))
            seconds = self._chance.randint(1, 6) / 10
            return Pause(node=self._chance.choice(self._alive), part=part, seconds=seconds, when=when)
        if kind is EtcdPause:
            return EtcdPause(seconds=AWAY, when=when)
        if kind in _OF_ETCD:
            return kind(when=when)
        node = self._chance.choice(self._alive[1:] if kind in _LOSING else self._alive)
        if kind in _LOSING:
            self._alive.remove(node)
        given: dict[str, Any] = {"node": node, "when": when}
        return kind(**given)
