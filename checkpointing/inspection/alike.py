"""Tensors that differ by one number in their names, such as those of repeated blocks, told as one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Sequence

_NUMBER = re.compile(r"(?<=[./])(\d{1,9})(?=[./])", re.ASCII)


def gathered(items: Iterable[tuple[str, Hashable]]) -> list[tuple[str, list[str]]]:
    """Return names with the keys they stand for, in the order of the first of each.

    Items are keys with what they must have in common. The first number between dots is what may differ: the name of
    several has `{0..11}` in its place.
    """
    groups: dict[tuple[str, str, Hashable], dict[int, str]] = {}
    for key, common in items:
        match = _NUMBER.search(key)
        if match is None or str(int(match[1])) != match[1]:
            groups[key, "", common] = {0: key}
        else:
            groups.setdefault((key[: match.start()], key[match.end() :], common), {})[int(match[1])] = key
    named = []
    for (head, tail, _), members in groups.items():
        keys = [members[number] for number in sorted(members)]
        named.append((f"{head}{{{ranges(sorted(members))}}}{tail}" if len(keys) > 1 else keys[0], keys))
    return named


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in few letters: 0..3,5."""
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        own = [number for _, number in run]
        runs.append(str(own[0]) if len(own) == 1 else f"{own[0]}..{own[-1]}")
    return ",".join(runs)
