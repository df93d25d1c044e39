"""All that the page of a soak tells of it beside its samples, as it is kept in its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.growth.measures import Measure
from chaos.growth.soak import TRAIN_SOAK, Soak
from chaos.growth.verdict import SoakVerdict, lacking, verdict, wrong
from chaos.judging.promise import Promise

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakFault:
    """A fault that was made. text: with its node and its step. after: seconds since the soak began."""

    word: str
    text: str
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakFacts:
    """A soak. asked: seconds for which faults were to be made; trained: for which they were; every: between two.

    generations: how many there were, by their cause. wrong, lacking: why it failed, and why it is too short to tell.
    stopped: why it ended otherwise than at its time. logs: by node, the end of what an agent printed that ended badly.
    """

    script: str
    arguments: tuple[str, ...]
    nodes: int
    seed: int
    asked: float
    every: float
    trained: float
    seconds: float
    samples: int
    steps: int
    repeated: int
    verdict: SoakVerdict
    wrong: tuple[str, ...]
    lacking: tuple[str, ...]
    stopped: str
    promises: tuple[Promise, ...]
    faults: tuple[SoakFault, ...]
    generations: dict[str, int] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA


def facts(soak: Soak, series: Sequence[Measure]) -> SoakFacts:
    """Return what is to be told of a soak."""
    plan = soak.plan
    return SoakFacts(
        script=str(plan.script or TRAIN_SOAK),
        arguments=plan.given,
        nodes=plan.nodes,
        seed=plan.seed,
        asked=plan.seconds,
        every=plan.every,
        trained=soak.trained,
        seconds=soak.seconds,
        samples=len(soak.samples),
        steps=soak.steps,
        repeated=sum(known.repeated for known in soak.generations.values()),
        verdict=verdict(soak, series),
        wrong=wrong(soak, series),
        lacking=lacking(soak, series),
        stopped=soak.stopped,
        promises=soak.promises,
        faults=tuple(
            SoakFault(word=fault.WORD, text=str(fault), after=max(0.0, round(at - soak.began, 1)))
            for fault, at in soak.made
        ),
        generations=dict(Counter(known.cause for known in soak.generations.values())),
        logs=dict(soak.logs),
    )
