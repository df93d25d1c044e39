"""Judge a history: by its own events, and by an undisturbed run of the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chaos.follow import Ledger, ledger
from chaos.play import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a history proves. same_bits: None if nothing was compared. broken: each broken promise, as text."""

    same_bits: bool | None
    samples: Ledger
    broken: tuple[str, ...]

    @property
    def kept(self) -> bool:
        """Whether every promise held."""
        return not self.broken


def judge(outcome: Outcome, quiet: Outcome | None = None) -> Verdict:
    """Return what `outcome` proves; with `quiet`, whether it has the bits of an undisturbed run."""
    setting, picture = outcome.setting, outcome.picture
    samples = ledger(picture.steps, setting.steps * setting.global_batch)
    broken = [outcome.failure] if outcome.failure else []
    broken += [f"{fault}: its moment never came" for fault in outcome.undone]
    for name, code in outcome.exit_codes.items():
        # After SIGTERM torchrun ends with 1, whatever its workers return.
        if name not in outcome.killed and code != (1 if name in outcome.dismissed else 0):
            broken.append(f"{name} ended with {'no exit code' if code is None else f'exit code {code}'}")
    broken += [f"user code raised: {error.strip().splitlines()[-1]}" for error in picture.errors if error.strip()]
    if picture.step != setting.steps:
        broken.append(f"the job ended after step {picture.step} of {setting.steps}")
    elif outcome.store and setting.steps not in picture.checkpoints:
        newest = max(picture.checkpoints, default=0)
        broken.append(f"the run's last step, {setting.steps}, is no checkpoint; the newest one is of step {newest}")
    if outcome.digest is None:
        broken.append("the job left no digest")
    broken += [
        f"generation {view.number} ({view.cause}) was planned, and repeated {view.planned_repeats} step(s)"
        for view in picture.generations
        if view.planned_repeats
    ]
    broken += [f"step {step} was done again with other bits" for step in picture.conflicts]
    if samples.missing or samples.repeated:
        broken.append(f"{samples.missing} samples missing, {samples.repeated} repeated")
    broken += [f"left behind: {left}" for left in outcome.leftovers]
    differences = [] if quiet is None else compare(outcome, quiet)
    return Verdict(
        same_bits=None if quiet is None else not differences,
        samples=samples,
        broken=(*broken, *differences),
    )


def compare(outcome: Outcome, quiet: Outcome) -> list[str]:
    """Return how two histories of one job differ in their bits; empty if they do not."""
    if quiet.digest is None:
        return [f"the undisturbed run failed: {quiet.failure or 'it left no digest'}"]
    differences = []
    for mine, theirs in zip(outcome.picture.steps, quiet.picture.steps, strict=False):
        if mine.loss != theirs.loss:
            differences.append(f"loss of step {mine.number} is {mine.loss}, undisturbed {theirs.loss}")
            break
        if (mine.samples, mine.sample_sum) != (theirs.samples, theirs.sample_sum):
            differences.append(f"step {mine.number} consumed other samples than the undisturbed run")
            break
    if len(outcome.picture.steps) != len(quiet.picture.steps):
        differences.append(f"{len(outcome.picture.steps)} steps, undisturbed {len(quiet.picture.steps)}")
    if outcome.digest != quiet.digest:
        differences.append(f"digest {outcome.digest}, undisturbed {quiet.digest}")
    return differences


def document(outcome: Outcome, verdict: Verdict) -> dict[str, Any]:
    """Return the outcome as the one JSON document that `elastic3d demo --json` prints."""
    return {
        "digest": outcome.digest,
        "losses": list(outcome.picture.losses),
        "generations": [
            {
                "number": view.number,
                "cause": view.cause,
                "nodes": list(view.nodes),
                "layout": {axis: view.layout.get(axis) for axis in ("pp", "dp", "tp", "zero")},
                "first_step": view.first_step,
                "steps_repeated": view.steps_repeated,
                "restored_from": view.restored_from,
                "seconds_to_first_step": view.seconds_to_first_step,
            }
            for view in outcome.picture.generations
        ],
        "samples": {
            "consumed": verdict.samples.consumed,
            "repeated": verdict.samples.repeated,
            "missing": verdict.samples.missing,
        },
        "same_bits": verdict.same_bits,
        "leftovers": list(outcome.leftovers),
    }
