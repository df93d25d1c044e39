"""What a script asks for besides the model: the same on every node, and compared with the script of a saved state."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from elastic3d.data import Order
from elastic3d.errors import ConfigurationError, StateError, StateUnfit, UsageError
from elastic3d.parallel import facts
from elastic3d.port import Assignment
from elastic3d.provenance import config
from elastic3d.provenance.record import Provenance
from elastic3d.training.state_facts import AskedState


@functools.cache
def script_digest() -> str:
    """Return the digest of the file this process runs as its script, "" if there is none.

    It is read once, when the script calls `elastic3d.run`: a file that is changed later is not the one that runs.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return "" if path is None else blake3(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return ""


def check_planned(profile: str, assignment: Assignment) -> None:
    """Raise ConfigurationError where the leader planned from another profile: this node would train another model.

    profile: digest of this script's.
    """
    if profile != assignment.seed_digest:
        raise ConfigurationError(
            f"node {assignment.node}: this script's model, batches or seeds are not those the run was planned from; "
            "run the same script with the same arguments on every node"
        )


def schedule_digest(optimizer: torch.optim.Optimizer, schedule: Any) -> str:
    """Return the digest of a fresh optimizer's class and hyperparameters, and of the schedule's."""
    said = [kind_of(optimizer), kind_of(schedule)]
    try:
        said += [facts.optimizer_groups(optimizer), facts.schedule_state(schedule)]
    except StateError:
        # What cannot be written down cannot be compared; saving it will raise the error.
        pass
    return blake3(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def asked(optimizer: torch.optim.Optimizer, schedule: Any, order: Order, leaf: int = 1, chunks: int = 1) -> AskedState:
    """Return what the script asks for, from a fresh optimizer and schedule; saved with every state."""
    try:
        groups, state = tuple(facts.optimizer_groups(optimizer)), facts.schedule_state(schedule)
    except StateError:
        groups, state = (), None
    return AskedState(
        optimizer=kind_of(optimizer),
        schedule=kind_of(schedule),
        micro_batch=order.micro_batch,
        budget="" if order.budget is None else str(order.budget),
        groups=groups,
        schedule_state=state,
        leaf=leaf,
        chunks=chunks,
    )


def check_sums(saved: AskedState | None, now: AskedState) -> None:
    """Raise StateUnfit for other leaves or chunks than those of the saved state; one that does not say has 1 of each.

    Chunks may also be computed in another way than the whole.
    """
    for name, then, here in (
        ("leaf", 1 if saved is None else saved.leaf, now.leaf),
        ("chunks", 1 if saved is None else saved.chunks, now.chunks),
    ):
        if then != here:
            raise StateUnfit(
                f"the saved state was trained with {name}={then}, and this script has {name}={here}: gradients would "
                "be summed in another order from here on. Trying again does not help: go back to "
                f"run.shard(..., {name}={then}), or start a new run"
            )


ACCEPTED = ("config", "data", "schedule", "extra", "stop", "weights")
"""What `run.restore(..., accept=)` may name: what is not gone on from, or with, unless a script asks for it."""

OF_SCHEDULES = ("lr", "initial_lr")
"""Hyperparameters that a schedule makes out."""


def accepted(accept: str | Iterable[str]) -> frozenset[str]:
    """Return which changes a script asks for; UsageError for what is none."""
    asked_for = frozenset((accept,) if isinstance(accept, str) else accept)
    if unknown := sorted(asked_for.difference(ACCEPTED), key=str):
        raise UsageError(f"run.restore: accept= takes {', '.join(map(repr, ACCEPTED))}; {unknown[0]!r} is none of them")
    return asked_for


def schedule_change(saved: AskedState, now: AskedState) -> str:
    """Return in words how the schedule is another one than that of a state, "" where it is of the same class."""
    if saved.schedule == now.schedule:
        return ""
    return (
        f"the schedule was {saved.schedule or 'none'} and is {now.schedule or 'none'} from here on, and learning rates "
        "are the script's"
    )


def check_same_config(mine: str | None, all_ranks: Provenance | None, node: str) -> None:
    """Raise ConfigurationError where this node's script was given another configuration than that of rank 0.

    mine: its version, "" for none; None where nothing is known of it.
    """
    if mine is not None and all_ranks is not None and mine != all_ranks.config_version:
        here, there = mine[:12] or "none", all_ranks.config_version[:12] or "none"
        raise ConfigurationError(
            f"node {node}: elastic3d.run(config=...) is another one here than on the node of rank 0 (its version is "
            f"{here} here and {there} there); run the same script with the same arguments on every node"
        )


def config_change(saved: Provenance | None, now: Provenance | None) -> str:
    """Return in words how the configuration is another one than that of a state, "" where it is not.

    A state that has none says nothing of it; where the script gives none any more, that is a change.
    """
    if saved is None or saved.config is None:
        return ""
    if now is None or now.config is None:
        return f"config had version {saved.config_version[:12]} and is not given from here on"
    changed = config.changes(saved.config, now.config)
    return f"config: {config.in_words(changed)} from here on" if changed else ""


def check_config(saved: Provenance | None, now: Provenance | None, step: int, accept: Collection[str] = ()) -> None:
    """Raise StateUnfit where the configuration is another one than that of the state of a step, unless accepted."""
    change = config_change(saved, now)
    if change and "config" not in accept:
        raise StateUnfit(
            f"the state of step {step} was made with another configuration: {change}. Trying again does not help: go "
            "back to the old values, or start a new run; where it changed on purpose, say so: "
            'run.restore(..., accept="config")'
        )


def changes(saved: AskedState, now: AskedState, accept: Collection[str] = ()) -> list[str]:
    """Return in words where the script differs from the one that made a saved state, and which of the two counts.

    StateUnfit for another class of optimizer or schedule, whose state means nothing to this one; of a schedule it may
    be what the script asks for.
    """
    kinds = (("optimizer", saved.optimizer, now.optimizer), ("schedule", saved.schedule, now.schedule))
    for what, then, here in kinds:
        if then != here and what not in accept:
            kind = then or "none"
            way = '; where it changed on purpose, say so: run.restore(..., accept="schedule")'
            raise StateUnfit(
                f"the saved state was made with {kind} as its {what}, and this script has {here or 'none'}. Trying "
                f"again does not help: go back to {kind}, or start a new run{way if what == 'schedule' else ''}"
            )
    lines = []
    if schedule_change(saved, now):
        kept = tuple({k: v for k, v in group.items() if k not in OF_SCHEDULES} for group in now.groups)
        now, saved = replace(now, groups=kept), replace(saved, schedule_state=now.schedule_state)
    before, after = (one.budget or str(one.micro_batch) for one in (saved, now))
    if before != after:
        lines.append(
            f"micro_batch was {before} and is {after} from here on: the samples are the same, the bits are not"
        )
    for number, (old, new) in enumerate(zip(saved.groups, now.groups, strict=False)):
        lines += [_kept(f"{key} of parameter group {number}", old, new, key) for key in new if old.get(key) != new[key]]
    was, is_now = saved.schedule_state or {}, now.schedule_state or {}
    lines += [_kept(f"{key} of the schedule", was, is_now, key) for key in is_now if was.get(key) != is_now[key]]
    return lines


def _kept(what: str, saved: Mapping[str, Any], now: Mapping[str, Any], key: str) -> str:
    return (
        f"{what} is {now[key]} in the script and was {saved.get(key)} when the run began: the saved one counts; to "
        "change it set it after run.restore"
    )


def kind_of(thing: Any) -> str:
    """Return the name of an object's class, "" for None."""
    return "" if thing is None else f"{type(thing).__module__}.{type(thing).__qualname__}"
