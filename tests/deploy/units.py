"""Units and environment files of systemd, read as systemd reads them, as far as these go."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

KEYS = {
    "Unit": "Description Documentation Wants After StartLimitIntervalSec StartLimitBurst",
    "Service": (
        "Type User Group EnvironmentFile Environment WorkingDirectory ExecStart KillMode KillSignal TimeoutStartSec "
        "TimeoutStopSec SuccessExitStatus Restart RestartSec OOMPolicy OOMScoreAdjust MemoryMax StateDirectory "
        "StateDirectoryMode CacheDirectory LimitNOFILE LimitMEMLOCK LimitCORE NoNewPrivileges CapabilityBoundingSet "
        "AmbientCapabilities ProtectSystem ProtectHome PrivateTmp PrivateDevices ProtectClock ProtectHostname "
        "ProtectKernelLogs ProtectKernelModules ProtectKernelTunables ProtectControlGroups ProtectProc "
        "RestrictAddressFamilies RestrictNamespaces RestrictRealtime RestrictSUIDSGID LockPersonality "
        "MemoryDenyWriteExecute SystemCallArchitectures SystemCallFilter"
    ),
    "Timer": "OnCalendar RandomizedDelaySec Persistent",
    "Install": "WantedBy",
}
"""The keys that are used, by section, from systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.kill(5),
systemd.resource-control(5) and systemd.timer(5). systemd only warns of one that it does not know."""


class Unknown(Exception):
    """A unit has a line that systemd would ignore."""


def read(text: str) -> dict[str, dict[str, list[str]]]:
    """Return the values of each key of each section; Unknown for what is not in KEYS or is no line of a unit."""
    unit: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in text.splitlines():
        if not line or line.startswith(("#", ";")):
            continue
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
            if section not in KEYS:
                raise Unknown(line)
            unit[section] = {}
        else:
            key, equals, value = line.partition("=")
            if not section or not equals or key not in KEYS[section].split():
                raise Unknown(line)
            unit[section].setdefault(key, []).append(value)
    return unit


def variables(path: Path) -> dict[str, str]:
    """Return what an environment file sets."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def command(line: str, environment: dict[str, str]) -> list[str]:
    """Return the words of an ExecStart: ${NAME} is one word, or part of one, and a word $NAME is split at spaces."""
    words = []
    for word in shlex.split(line):
        if match := re.fullmatch(r"\$(\w+)", word):
            words += environment[match[1]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda name: environment[name[1]], word))
    return words
