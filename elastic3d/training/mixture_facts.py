"""Whether a state's samples were drawn from the strata or the mixture that a script has now."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from elastic3d.data.mixing import LinearSteps, stretches
from elastic3d.data.positions import Order
from elastic3d.data.proportions import MixedSource, Proportions
from elastic3d.errors import StateUnfit

_HELP = "Trying again does not help: go back to the old ones, or start a new run"


def check_mixture(saved: Order, now: Order, step: int) -> str:
    """Return in words what is mixed otherwise from `step` on, "" for nothing; StateUnfit if it was so before.

    Both orders have the same seed, and the same global batches before `step`.
    """
    then, here = saved.proportions, now.proportions
    if (then is None) != (here is None):
        raise StateUnfit(
            f"the state of step {step} was trained on {_kind(then)} and run.batches now has {_kind(here)}: its samples "
            f"could not be accounted for. {_HELP}"
        )
    if saved.strata != now.strata:
        raise StateUnfit(
            f"the state of step {step} was trained on {_strata(saved)} and run.batches now has {_strata(now)}: its "
            f"samples could not be accounted for. {_HELP}"
        )
    if then is None or here is None:
        return ""
    new = _check_sources(then.sources, here.sources, step)
    _check_weights(saved, now, step)
    if not new and (then.stages, then.linear) == (here.stages, here.linear):
        return ""
    since = [step, *(stage.step for stage in here.stages if stage.step > step)]
    said = [f"from step {first} on {spelled(here, first)}" for first in since]
    added = [f"added {', '.join(source.name for source in new)}"] if new else []
    return "; ".join([*added, *said]) + (", in straight lines between them" if here.linear and len(since) > 1 else "")


def spelled(proportions: Proportions, step: int) -> str:
    """Return the weights of a step for people."""
    named = zip(proportions.sources, proportions.at(step), strict=True)
    return ", ".join(f"{source.name} {float(weight):g}" for source, weight in named)


def _strata(order: Order) -> str:
    return f"{len(order.strata):,} strata of a stratified data set" if order.strata else "a data set without strata"


def _kind(proportions: Proportions | None) -> str:
    names = [] if proportions is None else [source.name for source in proportions.sources]
    return f"a mixture of {', '.join(names)}" if names else "a data set that is no mixture"


def _check_sources(saved: tuple[MixedSource, ...], now: tuple[MixedSource, ...], step: int) -> tuple[MixedSource, ...]:
    """Return the sources that were added behind those of the state."""
    for old, new in zip_longest(saved, now[: len(saved)]):
        trusted = new is not None and not (old.fingerprint and new.fingerprint)
        same = new is not None and (old.name, old.length) == (new.name, new.length)
        if not same or not (trusted or old.fingerprint == new.fingerprint):
            raise StateUnfit(
                f"the state of step {step} was trained on a mixture with {_source(old)} and run.batches now has "
                f"{'none' if new is None else _source(new)} in its place: its samples could not be accounted for. "
                f"Sources can be added behind the old ones; for an end to one give it weight 0. {_HELP}"
            )
    return now[len(saved) :]


def _source(source: MixedSource) -> str:
    contents = f" and the contents {source.fingerprint}" if source.fingerprint else ""
    return f"the source {source.name!r} of {source.length:,} samples{contents}"


def _check_weights(saved: Order, now: Order, step: int) -> None:
    assert saved.proportions is not None
    assert now.proportions is not None
    width = len(now.proportions.sources)
    past = [_widened(one, width) for one in stretches(saved.proportions, saved.parts, saved.seed) if one.first < step]
    same = [one for one in stretches(now.proportions, now.parts, now.seed) if one.first < step]
    for old, new in zip_longest(past, same):
        if old != new:
            first = min(one.first for one in (old, new) if one is not None)
            raise StateUnfit(
                f"the state of step {step} was trained with {spelled(saved.proportions, first)} from step {first} on "
                f"and run.batches now has {spelled(now.proportions, first)}, or another slope: the samples of steps "
                "that were made could not be accounted for. Keep the weights up to here and change them from this step "
                f"on, as weights=[(0, ...), ({step}, ...)], or start a new run"
            )


def _widened(stretch: LinearSteps, width: int) -> LinearSteps:
    """Return the same steps with sources of weight 0 behind the others."""
    more = width - len(stretch.ends)
    return replace(
        stretch,
        ends=stretch.ends + (stretch.batch * stretch.divisor,) * more,
        slopes=stretch.slopes + (0,) * more,
        before=stretch.before + (0,) * more,
    )
