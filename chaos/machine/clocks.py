"""Wall clocks of nodes that can be set: each node of a job has one of its own, though all share this machine's.

    with Clocks() as clocks:
        subprocess.Popen(command, env={**os.environ, **clocks.environment("node1")})
        clocks.shift("node1", 3600.0)

A small library, made of `clock_shim.c` by gcc, is preloaded into all that the node starts. Programs that do not ask the
C library for the time have this machine's, and so have the times of files, which the kernel sets.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from elastic3d.clock import SYSTEM, Clock

LEAST, MOST = 60.0, 86400.0
"""Seconds that a clock may jump at once: less is hardly told from a pause, and no node trains long before its build."""

LIBRARIES = "LD_PRELOAD"
"""The name in an environment of the libraries that a program loads before the C library; see ld.so(8)."""

_SOURCE = Path(__file__).with_name("clock_shim.c")
_OFFSET = struct.Struct("=q")
_SECONDS = 60.0


class Clocks:
    """The wall clocks of nodes, which show this machine's time until they are shifted.

    OSError says why there can be none here. clock: this machine's own.
    """

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._folder = Path()
        self._jumps: dict[str, list[float]] = {}

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="elastic3d-clocks-"))
        try:
            _build(self._library)
            self._try()
        except BaseException:  # also where a person ends it here
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files. What runs keeps the clock that it has."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def environment(self, node: str) -> dict[str, str]:
        """Return what gives a process of this node its clock, and all that it starts."""
        if node not in self._jumps:
            self._jumps[node] = []
            self._offset(node).write_bytes(_OFFSET.pack(0))
        preloaded = (str(self._library), os.environ.get(LIBRARIES, ""))
        return {LIBRARIES: " ".join(filter(None, preloaded)), "ELASTIC3D_CLOCK_OFFSET": str(self._offset(node))}

    def shift(self, node: str, seconds: float) -> None:
        """Have a node's clock jump by so many seconds, from where it is."""
        jumps = self._jumps[node]
        jumps.append(seconds)
        # In place, and in one write: it is mapped.
        with self._offset(node).open("r+b", buffering=0) as file:
            file.write(_OFFSET.pack(round(sum(jumps) * 1e9)))

    def righted(self, node: str, at: float) -> float:
        """Return the time by this machine's clock of what a node has written just now, by its own clock."""
        return righted(at, self._jumps.get(node, ()), self._clock.wall())

    @property
    def _library(self) -> Path:
        return self._folder / "clock_shim.so"

    def _offset(self, node: str) -> Path:
        return self._folder / f"{node}.offset"

    def _try(self) -> None:
        """Raise OSError where a program that is started with it does not have its clock."""
        environment = self.environment("trial")
        self.shift("trial", -MOST)
        command = [sys.executable, "-I", "-S", "-c", "import time; print(time.time())"]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if done.returncode or not abs(float(done.stdout) + MOST - self._clock.wall()) < LEAST:
            raise OSError(
                f"a library that is preloaded does not change this interpreter's clock: {done.stderr.strip()}"
            )


def righted(at: float, jumps: Sequence[float], now: float) -> float:
    """Return the right time of `at`, by a clock that has jumped so: by the offset that makes it the nearest to now."""
    return min((at - offset for offset in (0.0, *itertools.accumulate(jumps))), key=lambda one: abs(now - one))


def _build(library: Path) -> None:
    """Compile the shim; OSError says what gcc said, or that there is none."""
    command = ["gcc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    try:
        done = subprocess.run(
            [*command, "-ldl", "-lpthread"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        raise OSError("there is no gcc: install it") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"gcc has not ended within {_SECONDS:.0f} s") from None
    if done.returncode:
        raise OSError(f"gcc does not compile {_SOURCE.name}: {done.stderr.strip()[:500]}")
