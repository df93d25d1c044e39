"""The names of objects (format.md, section 4). Nothing else builds or takes apart a name."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PROBED = re.compile(r"probe/[A-Za-z0-9_-][A-Za-z0-9._-]*")
_CHECKPOINT = re.compile(r"(\d{12,19})\.(\d{8,19})\.(\d{4,19})\.(\d{8,19})", re.ASCII)
_MANIFEST = re.compile(r"saves/(\d{12,19})\.(\d{8,19})\.(\d{4,19})/(\d{5,19})(?:\.([0-9a-f]{32}))?\.manifest", re.ASCII)
_PACK = re.compile(r"packs/([0-9a-f]{2})/([0-9a-f]{64})\.pack")
_HISTORY = re.compile(r"history/[0-9a-f]{32}\.history")
_TOMBSTONE = re.compile(r"sweeps/[0-9a-f]{32}\.tombstone")
_ANNOUNCEMENT = re.compile(r"announcements/[0-9a-f]{32}\.announcement")
_CLAIM = re.compile(r"claims/[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")

LATEST = "refs/latest"
REFS = "refs/"
CHECKPOINTS = "checkpoints/"
PACKS = "packs/"
SAVES = "saves/"
HISTORY = "history/"
SWEEPS = "sweeps/"
SHADOW = "shadow/latest"
PROBE = "probe/"
CLAIMS = "claims/"
ANNOUNCEMENTS = "announcements/"
_ALL = (REFS, CHECKPOINTS, PACKS, SAVES, HISTORY, SWEEPS, SHADOW, PROBE, CLAIMS, ANNOUNCEMENTS)
FOLDERS = frozenset(prefix.partition("/")[0] for prefix in _ALL)
"""What all names begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One step's state, made in one generation, in one attempt."""

    step: int
    made_in: int
    attempt: int

    def __post_init__(self) -> None:
        for field in ("step", "made_in", "attempt"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
                raise ValueError(f"a save's {field} is a whole number from 0, not {value!r}")

    def __str__(self) -> str:
        return f"{self.step:012d}.{self.made_in:08d}.{self.attempt:04d}"


def manifest(save: Save, rank: int, write_id: str = "") -> str:
    """Return the name of a rank's manifest. write_id: 32 random hex digits if the store does not decide creations."""
    return f"saves/{save}/{rank:05d}{write_id and '.'}{write_id}.manifest"


def manifests(save: Save, rank: int | None = None) -> str:
    """Return the prefix of a save's manifests, or of one rank's."""
    return f"saves/{save}/" if rank is None else f"saves/{save}/{rank:05d}."


def manifest_write_id(name: str) -> str:
    """Return the write-id in a manifest's name, "" if it has none, or names no manifest."""
    match = _MANIFEST.fullmatch(name)
    return (match[5] or "") if match else ""


def pack(pack_id: str) -> str:
    """Return the name of a pack."""
    return f"packs/{pack_id[:2]}/{pack_id}.pack"


def checkpoint(save: Save, committed_in: int) -> str:
    """Return the name of a checkpoint, as refs and people use it."""
    return f"{save}.{committed_in:08d}"


def record(checkpoint_name: str) -> str:
    """Return the name of a checkpoint's record."""
    return f"{CHECKPOINTS}{checkpoint_name}.record"


def history(write_id: str) -> str:
    """Return the name of a part of the history; `write_id` is 32 random hex digits."""
    return f"{HISTORY}{write_id}.history"


def tombstone(write_id: str) -> str:
    """Return the name of a tombstone; `write_id` is 32 random hex digits."""
    return f"{SWEEPS}{write_id}.tombstone"


def announcement(write_id: str) -> str:
    """Return the name of an announcement; `write_id` is 32 random hex digits."""
    return f"{ANNOUNCEMENTS}{write_id}.announcement"


def is_announcement(text: object) -> bool:
    """Return whether `text` names an announcement."""
    return isinstance(text, str) and _ANNOUNCEMENT.fullmatch(text) is not None


def is_claim(text: str) -> bool:
    """Return whether `text` names bytes that wait for a register's decision."""
    return _CLAIM.fullmatch(text) is not None


def is_history(text: object) -> bool:
    """Return whether `text` names a part of the history."""
    return isinstance(text, str) and _HISTORY.fullmatch(text) is not None


def is_tombstone(text: object) -> bool:
    """Return whether `text` names a tombstone."""
    return isinstance(text, str) and _TOMBSTONE.fullmatch(text) is not None


def is_tag(text: object) -> bool:
    """Return whether `text` may be a tag: up to 100 letters, digits, `._+-`; no number, no checkpoint, no ref."""
    if not isinstance(text, str) or not _TAG.fullmatch(text):
        return False
    return text not in ("latest", "verified") and not re.fullmatch(r"[0-9.]+", text)


def is_digest(text: object) -> bool:
    """Return whether `text` is 64 lower-case hex digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def parse_checkpoint(text: object) -> tuple[Save, int] | None:
    """Return (save, committed in) of a checkpoint's name, None if it is not exactly one."""
    match = _CHECKPOINT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    step, made_in, attempt, committed_in = map(int, match.groups())
    if max(step, made_in, attempt, committed_in) >= 1 << 63:
        return None
    save = Save(step=step, made_in=made_in, attempt=attempt)
    return (save, committed_in) if checkpoint(save, committed_in) == text else None


def parse_record(text: str) -> str | None:
    """Return the checkpoint's name from its record's, None if it names no record."""
    if not (text.startswith(CHECKPOINTS) and text.endswith(".record")):
        return None
    name = text[len(CHECKPOINTS) : -len(".record")]
    return name if parse_checkpoint(name) else None


def parse_manifest(text: object) -> tuple[Save, int] | None:
    """Return (save, rank) of a manifest's name, None if it is not exactly one."""
    match = _MANIFEST.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    step, made_in, attempt, rank = map(int, match.groups()[:4])
    if max(step, made_in, attempt) >= 1 << 63:
        return None
    save = Save(step=step, made_in=made_in, attempt=attempt)
    return (save, rank) if manifest(save, rank, match[5] or "") == text else None


def parse_pack(text: str) -> str | None:
    """Return the pack's id from its name, None if it names no pack."""
    match = _PACK.fullmatch(text)
    return match[2] if match and match[2].startswith(match[1]) else None


def is_collectable(text: str) -> bool:
    """Return whether a sweep may ever delete the object: one of this format, but not a ref."""
    if parse_pack(text) or parse_manifest(text) or parse_record(text) or is_history(text) or is_tombstone(text):
        return True
    # What somebody else put there may have a name that no object has, and that nobody can delete.
    return _PROBED.fullmatch(text) is not None
