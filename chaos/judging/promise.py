"""What is promised of a run, and what a judge makes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Something that is promised of every run.

    says: what, as a sentence. page: of docs/, that promises it. seen: what speaks for it; where it was not judged, why.
    broken: what speaks against it. judged: False where this run cannot tell.
    """

    says: str
    page: str
    seen: str
    broken: tuple[str, ...] = ()
    judged: bool = True

    @property
    def held(self) -> bool | None:
        """Whether it held, None where nobody can tell."""
        return False if self.broken else True if self.judged else None

    @property
    def told(self) -> tuple[str, ...]:
        """What speaks against it, each with what was promised, and by which page."""
        return tuple(f"{self.says} ({self.page}): {text}" for text in self.broken)
