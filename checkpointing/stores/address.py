"""Parses the URL of a store, and removes secrets from it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import StoreUnfit

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_USERINFO = re.compile(r"(?<=:)(/*)[^/@]*@")
_QUERY = re.compile(r"[?#].*")
_USERINFO_WITHIN = re.compile(r"(?<=://)\S*@")
_QUERY_WITHIN = re.compile(r"\?\S+")

NO_USER = "this machine knows no such user; write ./~ where it is a name"
"""What is said of a path that begins with `~` and the name of nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A store's place. path: of a directory, else None. scheme: empty for a plain path."""

    url: str
    scheme: str
    path: Path | None


def parse(url: str) -> Address:
    """Return the address in `url`: a path, `file://` and an absolute path, or another scheme; StoreUnfit otherwise."""
    if not url or url != url.strip() or "\0" in url:
        raise StoreUnfit(f"store {url!r}: give a directory, or a URL such as s3://bucket/prefix")
    scheme, separator, rest = url.partition("://")
    if not separator and _SCHEME.match(url):
        raise StoreUnfit(f"store {redacted(url)!r}: a URL has '://' after its scheme, as in s3://bucket/prefix")
    if separator and scheme != "file":
        return Address(url=url, scheme=scheme, path=None)
    try:
        path = Path(rest if separator else url).expanduser()
    except RuntimeError:
        raise StoreUnfit(f"store {url!r}: {NO_USER}") from None
    if separator and not path.is_absolute():
        raise StoreUnfit(f"store {url!r}: file:// takes an absolute path, as in file:///data/checkpoints")
    return Address(url=url, scheme=scheme if separator else "", path=path.absolute())


def redacted(url: str) -> str:
    """Return `url` without parts that may be secret: a user's name and password, and everything after a `?`."""
    return _QUERY.sub("?...", _USERINFO.sub(r"\1***@", url)) if _SCHEME.match(url) else url


def redacted_within(text: str) -> str:
    """Return `text` without such parts of the URLs, and of the paths with a query, that stand in it.

    For what others say of a failure: it is cut where in doubt.
    """
    return _QUERY_WITHIN.sub("?...", _USERINFO_WITHIN.sub("***@", text))


def split_name(url: str) -> tuple[str, str]:
    """Return a store's URL and the checkpoint that `URL@NAME` names in it, "" for none.

    An @ in the name of a directory that is there, or in the part of a URL that names the host, belongs to it.
    """
    before, at, name = url.rpartition("@")
    _, scheme, place = before.rpartition("://")
    if not at or not before or not name or "/" in name or (scheme and "/" not in place) or _is_there(url):
        return url, ""
    return before, name


def _is_there(url: str) -> bool:
    try:
        path = parse(url).path
    except StoreUnfit:
        return os.path.exists(url)
    return path is not None and os.path.exists(path)
