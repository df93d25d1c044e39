"""Trackers: where a run's curves are written, once for each committed step, whatever nodes die.

One node writes, which the generation's record names (`Generation.writer`). Every node that trains hears all steps and
keeps the newest points in memory (`points`). When another node takes over it reads back up to which step the tracker's
storage has points (`Tracker.open`), and writes those that are missing.
"""

from __future__ import annotations

from elastic3d.trackers.tracker import Position, Tracker

__all__ = ["Position", "Tracker"]
