"""Prometheus' own checker, used where it is at hand; what a test asserts by itself does not depend on it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def check(*arguments: str, given: str = "", folder: Path | None = None) -> None:
    """Assert that `promtool` finds nothing; do nothing where it is not on PATH."""
    program = shutil.which("promtool")
    if program is None:
        return
    done = subprocess.run(
        [program, *arguments], input=given, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
