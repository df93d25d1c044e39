"""Reports tensors whose names differ in one number, such as those of repeated blocks, as one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Sequence

_NUMBER = re.compile(r"(?<=[./])(\d{1,9})(?=[./])", re.ASCII)


def gathered(items: Iterable[tuple[str, Hashable]]) -> list[tuple[str, list[str]]]:
    """Return names with the keys that they stand for, in the order of the first key of each.

    Items are keys with the values that they must have in common. Keys may differ in the first number between dots: the
    name of several keys has `{0..11}` in its place.
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
    """Return ascending numbers in short form: 0..3,5."""
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        own = [number for _, number in run]
        runs.append(str(own[0]) if len(own) == 1 else f"{own[0]}..{own[-1]}")
    return ",".join(runs)
