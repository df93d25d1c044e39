"""The schedule and the job by which a soak is played again, as `elastic3d chaos replay` and `shrink` read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from chaos.faults.fault import Fault
from chaos.growth.soak import Plan, Soak, SoakSetting
from chaos.schedules.schedule import Schedule
from chaos.storms.storm import Job

_AFTER = 20
"""Steps that a job of ours makes after the last fault, at least: what it broke shows in them."""


def schedule_of(soak: Soak) -> Schedule:
    """Return what was done to the job: each fault at the step at which it was made.

    Where the job had gone back by then, at the one after that of the fault before: that orders them, whatever is made
    again, and leaves no two of them alike.
    """
    faults, step = list[Fault](), 0
    for fault, _ in soak.made:
        step = max(step + 1, fault.when.step)
        faults.append(dataclasses.replace(fault, when=dataclasses.replace(fault.when, step=step)))
    return Schedule(faults=tuple(faults))


def job_of(soak: Soak) -> Job:
    """Return the job: of ours one that ends by itself, after as many steps; of anybody's the script as it was given."""
    plan = soak.plan
    setting = plan.setting(Path())
    if isinstance(setting, SoakSetting):
        steps = max([soak.steps, *(fault.when.step + _AFTER for fault in schedule_of(soak).faults)])
        given = _arguments(plan, setting, steps)
    else:
        given = plan.given
    return Job(
        script=str(plan.script or setting.script),
        arguments=given,
        nodes=plan.nodes,
        seed=plan.seed,
        conf=dict(setting.conf),
        patience=plan.patience,
        # As it was played: a script that needs the internet has none on hosts of its own.
        loopback=True,
    )


def _arguments(plan: Plan, setting: SoakSetting, steps: int) -> tuple[str, ...]:
    """Return the arguments of a job of ours that ends after `steps`."""
    known = dataclasses.replace(setting, steps=steps, options=(f"--pace={plan.pace}", *plan.given))
    return known.arguments(store="{store}", events=Path("{events}"), out=Path("{out}"))
