"""What recovering, saving and joining cost, with where each figure comes from.

Every figure can be given: `--costs FILE` takes a TOML file of any of them, and `--show-costs` prints one with all.
Where a figure was measured, it was on a machine with 2 cores, CPU and gloo, or on one H200 (docs/figures.md); what only
several GPUs could show says that it is assumed. Times that the membership machine itself takes (noticing, agreeing,
sealing, waiting for newcomers) are not here: it runs.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from elastic3d.errors import UsageError


def _cost(value: float, source: str) -> float:
    made: float = field(default=value, metadata={"source": source})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCosts:
    """Seconds, and bytes per second. Each field's metadata say where its default comes from."""

    node_start: float = _cost(8.0, "torchrun and imports until a new node registers: measured, 7 to 8 s")
    build: float = _cost(
        0.62, "a trainer forked, the script, its groups, the model: measured, 0.17 + 0.03 + 0.12 + 0.30 s"
    )
    load: float = _cost(0.51, "deciding on the state and loading a small one: measured")
    first_step: float = _cost(
        0.12, "what a generation's first step takes beyond a median one: at most all of one, measured on one H200"
    )
    context: float = _cost(
        0.005, "a device opened by a trainer that stood ready with its context and kernels: measured on one H200"
    )
    cold_context: float = _cost(
        1.23, "the same where none stands ready, as for peers: measured on one H200, 0.18 s, and a first step of 1.05 s"
    )
    communicators: float = _cost(
        5.0, "NCCL's communicators: assumed; MegaScale (arXiv 2402.15627, 3.5) reports below 5 s on 2,048 GPUs"
    )
    peer_bandwidth: float = _cost(
        2.5e9, "bytes/s that a node takes from peers' memory: measured, 100 MB in 23 to 40 ms"
    )
    snapshot_bandwidth: float = _cost(17.5e9, "bytes/s of a device's snapshot: measured on one H200, by four threads")
    snapshot_slowdown: float = _cost(
        0.004, "share by which training is slower while a snapshot is copied: measured on one H200"
    )
    vote: float = _cost(
        0.0088, "what the vote and the norm hold up in each step: measured on one H200, of 300 M parameters"
    )
    copy_bandwidth: float = _cost(
        2.5e9, "bytes/s at which a device's snapshot goes to another node: measured, 100 MB in 23 to 40 ms"
    )
    save_bandwidth: float = _cost(0.73e9, "bytes/s that a node saves: measured, 0.96 GB in 1.32 s to a local disk")
    restore_bandwidth: float = _cost(1.8e9, "bytes/s that a node loads from a checkpoint: measured, 0.96 GB in 0.53 s")
    restart_notice: float = _cost(4.99, "torchrun c10d, tuned: until new processes begin after a death: measured")
    restart_begin: float = _cost(7.48, "the same: imports, groups, the model: measured, 5.73 + 0.17 + 1.58 s")
    restart_first_step: float = _cost(0.89, "the same: its first step beyond a median one: measured, 1.79 - 0.90 s")
    restart_stall: float = _cost(2.8e9, "DCP, asynchronous: bytes/s while training waits: measured, 0.96 GB in 0.344 s")
    restart_save: float = _cost(0.64e9, "DCP: bytes/s that a node saves: measured, 0.96 GB in 1.49 s")
    restart_restore: float = _cost(2.1e9, "DCP: bytes/s that a node loads: measured, 0.96 GB in 0.45 s")
    replica_recovery: float = _cost(
        1.07, "torchft 0.2.0, tuned: a replica lost, beyond a median step: measured, once of three"
    )
    replica_join: float = _cost(6.2, "the same: from its start until a replica takes part: measured")
    replica_pause: float = _cost(0.27, "the same: what the others wait for when one joins: measured")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            bandwidth = one.metadata["source"].find("bytes/s") >= 0
            if not math.isfinite(value) or value < 0 or (bandwidth and not value):
                wanted = "bytes per second, more than 0" if bandwidth else "seconds, or a share, 0 or more"
                raise UsageError(f"costs: {one.name} is {value:g}; give {wanted}")


def read_costs(path: Path | None, given: Iterable[str] = ()) -> RecoveryCosts:
    """Return the defaults, with what a TOML file and then `NAME=VALUE` say instead; UsageError, saying what to do."""
    costs = RecoveryCosts()
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"--costs {path}: it cannot be read ({reason}); --show-costs prints such a file") from None
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"--costs {path}: it is no TOML ({error}); --show-costs prints such a file") from None
        costs = _replaced(costs, data, f"--costs {path}")
    for text in given:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise UsageError(f"--cost {text}: give NAME=NUMBER, as in --cost node_start=30") from None
        costs = _replaced(costs, {name.strip(): number}, f"--cost {text}")
    return costs


def _replaced(costs: RecoveryCosts, data: dict[str, object], where: str) -> RecoveryCosts:
    names = [one.name for one in fields(costs)]
    numbers: dict[str, float] = {}
    for name, value in data.items():
        if name not in names:
            raise UsageError(f"{where}: there is no cost {name!r}; there are {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{where}: {name} is {value!r}; give a number")
        numbers[name] = value
    try:
        return replace(costs, **numbers)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def written(costs: RecoveryCosts) -> str:
    """Return the costs as a TOML file, each with its source."""
    lines = ["# Seconds, and bytes/s. A file for --costs may have any of these."]
    for one in fields(costs):
        lines += [f"# {one.metadata['source']}", f"{one.name} = {getattr(costs, one.name):.6g}"]
    return "\n".join(lines) + "\n"
