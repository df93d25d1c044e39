"""The configuration of a run, as `elastic3d.run(config=...)` takes it: plain values, checked where they enter."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from elastic3d.errors import UsageError

LARGEST = 64 * 1024
"""Bytes of a configuration as JSON. It is part of each state, in memory and in the store."""
DEEPEST = 16
SHOWN = 8
WIDEST = 80

_OF = "elastic3d.run: config"
_SECRET = re.compile(
    r"(^|[_\-.])(password|passwd|passphrase|secret|credentials?|(api|access|private|secret)[_\-]?key"
    r"|(api|access|auth|hf|bearer)[_\-]?token)$",
    re.IGNORECASE,
)
_SIMPLE = re.compile(r"[^.\"]+")
"""Keys that need no quotes in a path, so that no two values have the same."""
_PASSWORD_IN_URL = re.compile(r"://[^/\s@]*:[^/\s@]+@")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """A key whose value differs, by its path, such as `optimizer.lr`. before, after: as JSON, "" where it is not."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        """Return it in words."""
        was = f"was {_short(self.before)}" if self.before else "was not there"
        now = f"is {_short(self.after)}" if self.after else "is not there"
        return f"{self.key} {was} and {now}"


def plain(config: object) -> dict[str, Any]:
    """Return a dataclass or mapping as plain JSON data.

    UsageError, naming the key, for values that JSON cannot hold as they are, for secrets, and for what is too large.
    """
    if not isinstance(config, Mapping) and not _is_dataclass(config):
        hint = "; give vars(...) of it" if hasattr(config, "__dict__") and not isinstance(config, type) else ""
        raise UsageError(f"{_OF}={_short(repr(config))}: give a dataclass object or a mapping of plain values{hint}")
    made = _plain(config, "", 0)
    assert isinstance(made, dict)
    size = len(canonical(made).encode())
    if size > LARGEST:
        raise UsageError(
            f"{_OF} has {size} bytes as JSON, and {LARGEST} at most are kept with each state: leave out data, and name "
            "the file that it is in"
        )
    return made


def canonical(value: object) -> str:
    """Return plain data as JSON, the same text for the same data."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: object) -> str:
    """Return the digest of plain data, which is a configuration's version."""
    return blake3(canonical(value).encode()).hexdigest()[:32]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[ConfigChange, ...]:
    """Return which keys differ between two configurations, in order of their paths."""
    old, new = dict(_leaves(before, "")), dict(_leaves(after, ""))
    return tuple(
        ConfigChange(key=key, before=old.get(key, ""), after=new.get(key, ""))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    )


def in_words(changed: tuple[ConfigChange, ...]) -> str:
    """Return changes in one line, the first of many."""
    more = f"; and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return "; ".join(map(str, changed[:SHOWN])) + more


def flat(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the paths of all values, and the values as JSON."""
    return tuple(_leaves(config, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield paths and values; lists are values as a whole, and so is an object without keys."""
    if isinstance(value, Mapping) and (value or not path):
        for key in sorted(value):
            name = key if _SIMPLE.fullmatch(key) else json.dumps(key, ensure_ascii=False)
            yield from _leaves(value[key], f"{path}.{name}" if path else name)
    else:
        yield path, canonical(value)


def _plain(value: Any, path: str, depth: int) -> Any:
    at = f"{_OF}[{path!r}]" if path else _OF
    if depth > DEEPEST:
        raise UsageError(f"{_OF}: {path[:WIDEST]}... has more than {DEEPEST} levels, or holds itself")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UsageError(f"{at}={value!r}: JSON has no such number; give None, or a text")
        return float(value)
    if isinstance(value, str):
        return _text(str.__str__(value), path, at)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{number}]", depth + 1) for number, item in enumerate(value)]
    if _is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        made = {}
        for key, item in value.items():
            if not isinstance(key, str) or not key:
                raise UsageError(f"{at} has the key {_short(repr(key))}: give texts as keys")
            made[_text(str.__str__(key), "", f"{at}: key")] = _plain(item, f"{path}.{key}" if path else key, depth + 1)
        return made
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UsageError(
        f"{at} is a {kind}: give plain values, which are None, True or False, numbers, texts, and lists, mappings and "
        "dataclasses of these; str(...) of a path, .item() of a tensor"
    )


def _text(text: str, path: str, at: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{at}={text!r}: is not Unicode that can be written: {error.reason}") from error
    if text and (_SECRET.search(path) or _PASSWORD_IN_URL.search(text)):
        raise UsageError(
            f"{at} looks like a secret, and a run's configuration is in each of its checkpoints, for all who can read "
            "these: leave it out, and read it from the environment or a file"
        )
    return text


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
