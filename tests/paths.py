"""Paths of files that are not Python."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The checkout."""

DATA = Path(__file__).parent / "testdata"
"""Transcripts, displays, and stores written by earlier versions."""
