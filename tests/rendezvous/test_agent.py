"""What an agent knows of itself."""

from __future__ import annotations

import subprocess
import sys
import time


def test_a_process_knows_its_age() -> None:
    """From its start, however long it took to import: what it prints is within the time that passed here."""
    began = time.monotonic()
    code = "import time; time.sleep(0.3); from elastic3d.rendezvous import agent; print(agent.age())"
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    # The kernel counts in hundredths of a second.
    assert 0.28 <= age <= time.monotonic() - began + 0.02
