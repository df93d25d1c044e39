"""Which secret a member uses, by what it sees under the secret's key in etcd: pure state, no etcd and no clock.

**A valid secret is never overwritten**: a member that sees another one than its own takes it, so that all end up with
the one in etcd, whichever was first to write into an etcd that had lost it. If there is none, because it was deleted or
spoiled, the leader writes the one it knows, unless somebody was faster: members that join later need it. Connections
that stand go on through all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from elastic3d.trust.secret import readable


class What(StrEnum):
    """The change of the secret."""

    ADOPTED = "adopted"
    """There is another one: use it from now on."""
    RESTORED = "restored"
    """There was none: this member, which leads, writes its own again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretNews:
    """News for the member's owner. secret: the one to use. was: for RESTORED, "missing" or "garbage"; else ""."""

    what: What
    secret: str = field(repr=False)
    was: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Write `secret` if its key still has the mod revision `revision`, 0 for none."""

    secret: str = field(repr=False)
    revision: int
    was: str


class Agreement:
    """One member's part in agreeing on the secret."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self._spoiled: Restore | None = None

    def saw(self, value: bytes | None, revision: int) -> SecretNews | None:
        """Take in the key's value, None for none; return what is new for this member."""
        if value is None or not readable(value):
            was = "missing" if value is None else "garbage"
            self._spoiled = Restore(secret=self.secret, revision=0 if value is None else revision, was=was)
            return None
        self._spoiled = None
        if value.decode() == self.secret:
            return None
        self.secret = value.decode()
        return SecretNews(what=What.ADOPTED, secret=self.secret)

    def restore(self, *, leads: bool) -> Restore | None:
        """Return what to write now, once for each time that no valid secret was seen."""
        if not leads:
            return None
        due, self._spoiled = self._spoiled, None
        return due
