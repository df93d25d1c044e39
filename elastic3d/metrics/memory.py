"""Resident memory of processes by kind, from /proc/<pid>/status: cheap, however large a process is.

Proportional shares (`smaps_rollup`) would count shared pages once, but walk all page tables of a process while it may
map nothing: a trainer with hundreds of gigabytes would be held up by each scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastic3d.health.processes import read_proc

FIELDS: Mapping[str, str] = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}
"""Lines of /proc/<pid>/status, and what they are called here."""


def resident(pids: Iterable[int]) -> tuple[int, dict[str, int]]:
    """Return how many of the processes are there, and the bytes of all of them by kind."""
    there, nbytes = 0, dict.fromkeys(FIELDS.values(), 0)
    for pid in pids:
        lines = [line.split() for line in read_proc(f"/proc/{pid}/status").splitlines()]
        sizes = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}
        # One that has ended and is not reaped yet has no memory, and no such lines.
        there += FIELDS.keys() <= sizes.keys()
        for line, kind in FIELDS.items():
            nbytes[kind] += 1024 * sizes.get(line, 0)
    return there, nbytes
