"""An account of time in words, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elastic3d.accounting.goodput import GenerationGoodput, NodeGoodput
from elastic3d.accounting.recorded_events import SECOND
from elastic3d.accounting.spans import Category
from elastic3d.cli.durations import spell


def spelled(microseconds: int) -> str:
    """Return a duration; of less than a second with two digits after the point."""
    seconds = microseconds / SECOND
    return spell(seconds) if seconds >= 0.95 or not seconds else f"{max(0.01, seconds):.2f} s"


def spelled_parts(by_category: Mapping[Category, int]) -> Iterator[str]:
    """Yield what time went to, the most first."""
    for category, spent in sorted(by_category.items(), key=lambda item: -item[1]):
        if spent:
            yield f"{category.value} {spelled(spent)}"


def why(one: GenerationGoodput) -> str:
    """Return why a generation came to be: its cause, and who went and came for it."""
    moves = [f"without {_few(one.gone)}"] if one.gone else []
    moves += [f"with {_few(one.come)}"] if one.come else []
    return ", ".join([(one.cause or "not known").replace("_", " "), *moves])


def held_time(one: NodeGoodput) -> int:
    """Return for how many microseconds a node was held."""
    return one.microseconds - one.by_category[Category.AWAY]


def useful_share(one: NodeGoodput) -> float:
    """Return the share of them that went to steps that count."""
    whole = held_time(one)
    return one.by_category[Category.USEFUL] / whole if whole else 0.0


def most_lost(one: NodeGoodput) -> str:
    """Return the three categories to which a node lost most."""
    losses: dict[Category, int] = {
        name: spent for name, spent in one.by_category.items() if name is not Category.USEFUL
    }
    return ", ".join(list(spelled_parts(losses))[:3])


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
