"""What `elastic3d samples check --json` prints, beside its `schema`. Imported when it is printed: it brings torch."""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.data.ledger import Line
from elastic3d.data.positions import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesDocument:
    """What the account of a checkpoint, or of event files, proves."""

    consumed: int
    """Positions of the run that were consumed."""
    repeated: int
    """Of these, more than once."""
    missing: int
    """Positions that were passed over."""
    excluded: int
    """Positions that were left out, because what they hold is not finite or the script said so."""
    wrong: tuple[Line, ...]
    """Lines of the account whose counts or sums are not those of their steps; () of event files."""
    whole: bool
    """Whether every position was consumed exactly once, or left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSamplesDocument:
    """What one source of a mixture gave to the steps that are accounted for."""

    name: str
    """Its name."""
    samples: int
    """How many positions it was given, those that were left out included."""
    length: int
    """How many samples it has, each of which comes once in every epoch of the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSamplesDocument:
    """What `elastic3d samples check URL` tells, together with a SamplesDocument."""

    store: str
    """Its URL."""
    checkpoint: str
    """Its name."""
    order: Order
    """The order of the run's samples."""
    step: int
    """Steps that are accounted for."""
    lines: tuple[Line, ...]
    """The account itself."""
    sources: tuple[SourceSamplesDocument, ...] = ()
    """Of a mixture, what each of its sources gave; () of another data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSamplesDocument:
    """What `elastic3d samples check --events` tells, together with a SamplesDocument."""

    events: str
    """The folder."""
    steps: int
    """How many were found there."""
    run: str
    """The run whose steps they are: the one that wrote last, unless `--id` named it."""
    other_runs: tuple[str, ...]
    """The other runs in the folder."""
    untold: tuple[int, ...]
    """Of the steps, those that nobody lived to tell of: the run went on from their state. What they left out, if
    anything, is not known, and counts as consumed."""
