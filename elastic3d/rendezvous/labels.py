"""Where a node stands: its labels, from the command line, the environment or the scheduler, in that order.

    --rdzv-conf=labels=zone:eu1/rack:r7      torchrun cuts its conf at commas and equals signs
    ELASTIC3D_LABELS=zone=eu1,rack=r7
    Slurm        SLURM_TOPOLOGY_ADDR and SLURM_TOPOLOGY_ADDR_PATTERN, SLURMD_NODENAME
    Kubernetes   NODE_NAME, and a downward API file of the pod's labels: `key="value"` lines at ELASTIC3D_PODINFO, or
                 at /etc/podinfo/labels if it is there; topology.kubernetes.io/zone and region, kubernetes.io/hostname,
                 and elastic3d/zone, elastic3d/rack...

Each label comes from the first of these that has it; the host is the machine's host name if none says otherwise. Wrong
labels from a person are refused; a scheduler's are taken as far as they fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic3d import environment
from elastic3d.errors import ConfigurationError
from elastic3d.membership.topology import LEVELS

LABELS = environment.LABELS.name
PODINFO = environment.PODINFO.name
DEFAULT_PODINFO = "/etc/podinfo/labels"
_VALUE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LINE = re.compile(r'\s*([^=\s"]+)=(".*")\s*')

Read = Callable[[str], str]
"""Returns a file's text; raises OSError if it cannot."""


def labels_of(conf: str, variables: Mapping[str, str], hostname: str, read: Read) -> dict[str, str]:
    """Return a node's labels, far ones first; ConfigurationError for a person's mistakes.

    conf: the text of --rdzv-conf=labels, "" for none. hostname: of this machine.
    """
    labels = {"host": _fitting(hostname)}
    labels |= _kubernetes(variables, read)
    labels |= _slurm(variables)
    labels |= _given(variables.get(LABELS, ""), LABELS, ",", "=", "zone=eu1,rack=r7")
    labels |= _given(conf, "--rdzv-conf=labels", "/", ":", "zone:eu1/rack:r7")
    return {level: labels[level] for level in LEVELS if labels.get(level)}


def read_file(path: str) -> str:
    """Return a file's text: the `Read` of a real machine."""
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _given(text: str, source: str, between: str, inside: str, example: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for part in text.split(between) if text else ():
        name, separator, value = part.partition(inside)
        if not separator or name not in LEVELS or not _VALUE.fullmatch(value):
            raise ConfigurationError(
                f"{source}={text}: {part!r} is not a label; write them as {example}: names are {', '.join(LEVELS)}, "
                "values letters, digits and . _ -"
            )
        if name in labels:
            raise ConfigurationError(f"{source}={text}: {name} is there twice; give it once")
        labels[name] = value
    return labels


def _slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Return labels from e.g. "s0.s4.tux1" with pattern "switch.switch.node": the nearest switch first.

    A tree may have any number of levels: the nearest is the switch, the next the rack, all above it the zone.
    """
    labels = {}
    if name := variables.get(environment.SLURM_NODE.name):
        labels["host"] = _fitting(name)
    kinds = variables.get(environment.SLURM_LEVELS.name, "").split(".")
    # A node's own name may have dots; only its last part can.
    names = variables.get(environment.SLURM_PLACE.name, "").split(".", maxsplit=len(kinds) - 1)
    if len(names) != len(kinds) or kinds[-1] != "node":
        return labels
    labels.setdefault("host", _fitting(names.pop()))
    above = names[: len(kinds) - 1]
    levels = [*reversed(above[-2:]), ".".join(above[:-2])]
    labels |= {level: _fitting(name) for level, name in zip(("switch", "rack", "zone"), levels, strict=False) if name}
    return labels


def _kubernetes(variables: Mapping[str, str], read: Read) -> dict[str, str]:
    labels = {}
    if name := variables.get(environment.KUBERNETES_NODE.name):
        labels["host"] = _fitting(name)
    pod = _podinfo(variables, read)
    if name := pod.get("kubernetes.io/hostname"):
        labels["host"] = _fitting(name)
    region, zone = pod.get("topology.kubernetes.io/region", ""), pod.get("topology.kubernetes.io/zone", "")
    # Clouds name a zone after its region; on a site that does not, equal zones of two regions are still two.
    full = zone if zone.startswith(region) else ".".join(filter(None, (region, zone)))
    if full or region:
        labels["zone"] = _fitting(full or region)
    labels |= {level: _fitting(pod[f"elastic3d/{level}"]) for level in LEVELS if pod.get(f"elastic3d/{level}")}
    return labels


def _podinfo(variables: Mapping[str, str], read: Read) -> dict[str, str]:
    asked = variables.get(PODINFO)
    try:
        text = read(asked or DEFAULT_PODINFO)
    except OSError as error:
        if asked:
            raise ConfigurationError(
                f"{PODINFO}={asked} cannot be read ({error.strerror or error}): give the path of the downward API file"
            ) from error
        return {}
    labels = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is not None:
            try:
                labels[match[1]] = str(json.loads(match[2]))
            except ValueError:
                continue
    return labels


def _fitting(name: str) -> str:
    """Return a scheduler's name with characters replaced that a label's value cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]
