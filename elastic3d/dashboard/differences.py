"""What changed from one JSON document to the next, as a JSON merge patch (RFC 7396). Pure.

Objects are compared by key, everything else is replaced whole; null means that a key is gone, so that documents hold no
null as the value of a key.
"""

from __future__ import annotations

from typing import Any


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the patch that makes `new` of `old`, {} where nothing changed."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = difference(before, value)
            if inner:
                patch[key] = inner
        elif value != before or type(value) is not type(before):
            patch[key] = value
    return patch


def apply(patch: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return the document after the patch, as the page's script makes it."""
    result = dict(document)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            before = result.get(key)
            result[key] = apply(value, before if isinstance(before, dict) else {})
        else:
            result[key] = value
    return result
