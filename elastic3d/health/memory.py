"""Memory ran out: from what was missing to the next rung of a ladder that changes no bits. Pure.

The rungs: a leaner schedule, a higher ZeRO stage, blocks that are computed again in the backward pass, in part or
whole, more stages. All of them are among the layouts that the planner knows, and all keep the bits. So the ladder is
not a list that is climbed blindly: what is learned is a bound on what the planner may predict (`MemoryBound`), and it
chooses what costs the least time of all that stays below it (`planner.bounded`). Each rung needs less than the one
before, by what was missing, and by a share of it at least: where a rung is no better than the one before, the next one
lies further down, and after a few there are none.

What ran out on one rank bounds what every rank may need: the prediction was too low for that rank by some bytes, and
may be for any. Where no layout is as lean as that, less is asked: that the fullest rank needs less than it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic3d.membership.stalls import Verdict, VerdictKind
from elastic3d.planner.bounded import needed
from elastic3d.planner.loads import loads
from elastic3d.planner.memory import memory_of
from elastic3d.planner.schedules import schedule_of
from elastic3d.shortfall import MemoryBound, Shortfall, stronger
from elastic3d.values import Generation, Layout, ModelProfile

LEAST = 0.1
"""Share of what was predicted by which the next rung needs less, if less than that was missing or nobody knows."""

NONE = "none"
"""The rung where there is no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLadder:
    """What a leader climbs by. acts: it does; else what it would do is only reported."""

    acts: bool = True

    def bounds(
        self, generation: Generation, profile: ModelProfile, short: Mapping[str, Shortfall]
    ) -> tuple[MemoryBound, ...]:
        """Return below which bounds to look for the next layout, the lowest first; none where no layout would help."""
        layout, before = generation.layout, generation.memory
        if layout is None or not short or not _of_layout(short):
            return ()
        kind = recomputed(generation, profile)
        changed = replace(profile, recompute=kind)
        fullest = needed(layout, profile, kind)
        width = layout.world // layout.pp
        stages = loads(layout, changed)
        predicted = [int(sum(memory_of(stages[one.rank // width], layout, changed).values())) for one in short.values()]
        missing = max(one.missing for one in short.values())
        bounds = []
        for size in dict.fromkeys((min(predicted), fullest)):
            most = int(size - max(missing, LEAST * size))
            most = most if before is None else min(most, before.most)
            if most > 0:
                bounds.append(MemoryBound(most=most, recompute=kind))
        return tuple(bounds)

    def verdict(
        self,
        generation: Generation,
        profile: ModelProfile,
        short: Mapping[str, Shortfall],
        climbed: Generation | None,
        step: int,
    ) -> Verdict:
        """Return what is reported. climbed: the generation that needs less, None where nothing is done, or could be.

        step: the newest one made.
        """
        rung, change = NONE, _nothing(generation, profile, short)
        if climbed is not None and generation.layout is not None and climbed.layout is not None:
            before, after = recomputed(generation, profile), recomputed(climbed, profile)
            rung = rung_of(generation.layout, before, climbed.layout, after)
            change = (
                f"{climbed.layout}, recompute {after}: {_size(needed(climbed.layout, profile, after))} predicted for "
                f"the fullest rank instead of {_size(needed(generation.layout, profile, before))}"
            )
            change = f"from now on {change}" if self.acts else f"nothing is done, as health= says: it would be {change}"
        return Verdict(
            kind=VerdictKind.MEMORY,
            fault=rung,
            key=generation.key,
            step=step,
            detail=f"{'; '.join(words(id.partition('@')[0], one) for id, one in short.items())}; {change}",
            culprits=tuple(short),
            ranks=tuple(one.rank for one in short.values()),
            act=self.acts and climbed is not None,
        )


def recomputed(generation: Generation, profile: ModelProfile) -> str:
    """Return what blocks compute again in a generation: what the script says, or more."""
    return stronger(profile.recompute, generation.memory.recompute if generation.memory is not None else "none")


def rung_of(before: Layout, kind: str, after: Layout, later: str) -> str:
    """Return in words which rungs lie between two layouts, each with what its blocks compute again."""
    rungs = []
    if after.pp == before.pp and (schedule_of(after), after.virtual) != (schedule_of(before), before.virtual):
        rungs.append("leaner schedule")
    if after.zero > before.zero:
        rungs.append(f"ZeRO-{after.zero}")
    if kind != later:
        rungs.append(f"recompute {later}")
    if after.pp > before.pp:
        rungs.append("more stages")
    elif after.pp < before.pp or (after.dp, after.replicas) != (before.dp, before.replicas):
        rungs.append("another mesh")
    elif not rungs:
        rungs.append("other cuts")
    return ", ".join(rungs)


def words(node: str, short: Shortfall) -> str:
    """Return what ran out on a rank."""
    where = "the host's memory" if short.host else "its device's memory"
    said = f"rank {short.rank} on {node} ran out of {where}"
    facts = []
    if short.killed:
        facts.append("the kernel killed it")
    if short.asked:
        facts.append(f"{_size(short.asked)} asked")
    if short.asked and short.total:
        facts.append(f"{_size(short.free)} of {_size(short.total)} free")
    return f"{said} ({', '.join(facts)})" if facts else said


def _of_layout(short: Mapping[str, Shortfall]) -> bool:
    """Return whether it is memory of which another layout needs less: on devices, the host's is the loaders'."""
    return not any(one.elsewhere for one in short.values())


def _nothing(generation: Generation, profile: ModelProfile, short: Mapping[str, Shortfall]) -> str:
    """Return why there is no rung."""
    if not _of_layout(short):
        return (
            "no layout needs less of a host's memory where ranks compute on devices: look at data loaders, at the "
            "snapshots' share, and at what else runs there"
        )
    if generation.layout is not None and needed(generation.layout, profile, profile.recompute) == 0:
        return (
            "what this model needs is not known, since it does not run on meta: choose layout= and recompute= by hand"
        )
    return (
        f"nothing that this script leaves open needs less{_lacking(generation, profile, short)}: free layout= where it "
        "fixes axes, the ZeRO stage or the schedule, add nodes, or take a smaller micro_batch"
    )


def _lacking(generation: Generation, profile: ModelProfile, short: Mapping[str, Shortfall]) -> str:
    """Return how much memory is lacking, or what is known of it, in words to be put in; "" for nothing."""
    missing = max(one.missing for one in short.values())
    if missing:
        return f", and at least {_size(missing)} more is needed on a rank"
    total = min((one.total for one in short.values() if one.total), default=0)
    if generation.layout is None or not total:
        return ""
    fullest = needed(generation.layout, profile, recomputed(generation, profile))
    return f", and of {_size(total)} in all the fullest rank's tensors alone are predicted to take {_size(fullest)}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
