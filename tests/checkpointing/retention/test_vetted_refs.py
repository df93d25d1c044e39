"""Whatever order commits, audits, convictions and collections come in, `vetted` points to what is there and sound."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Collection, Iterator

import pytest

from checkpointing.format import distrust, names, refs
from checkpointing.format.distrust import Distrust
from checkpointing.format.refs import Ref, Target, Verdict
from checkpointing.retention.policy import Retention, retained

HISTORIES = 400
DIGEST = "0" * 64


def history(seed: int) -> Iterator[tuple[str, Ref, Ref]]:
    """Yield what is done to a ref, with the ref before and after: everything that moves it, in a random order."""
    draw = random.Random(seed)
    ref, step, generation = Ref(generation=1), 0, 1
    for _ in range(40):
        before = ref
        match draw.choice(["commit", "commit", "commit", "vet", "vet", "convict", "restart", "collect"]):
            case "commit":
                step += 1
                what = f"commit {step} of {generation}"
                save = names.Save(step=step, made_in=generation, attempt=0)
                ref = refs.committed_ref(ref, save, generation, DIGEST, "")
            case "vet" if ref.committed:
                name = draw.choice(ref.committed)
                what = f"vet {name}"
                target = Target(checkpoint=name, record_digest=DIGEST)
                if refs.decide_vetted(ref, ref.committed, target) is Verdict.MOVE:
                    ref = dataclasses.replace(ref, vetted=target)
            case "convict":
                rule = Distrust(before=generation + 1, step=draw.randrange(max(0, step - 4), step + 1))
                what = f"convict: {rule}"
                if refs.decide_distrust(ref, [rule]) is Verdict.MOVE:
                    ref = refs.distrusting_ref(ref, [rule], "")
                generation, step = generation + 1, min(step, rule.step)
            case "restart":
                what = "restart"
                generation, step = generation + 1, draw.randrange(max(0, step - 2), step + 1)
            case _:
                what = "collect"
                kept = retained(ref.committed, Retention(keep_last=1), ref.protected)
                ref = refs.kept_ref(ref, kept[1:], None, 0.0, "")
        yield what, before, ref


def violations() -> list[str]:
    """Return what is wrong with the refs of many histories."""
    wrong = []
    for seed in range(HISTORIES):
        for what, before, after in history(seed):
            vetted = after.vetted.checkpoint if after.vetted is not None else None
            if vetted is not None and vetted not in after.committed:
                wrong.append(f"{seed}: {what}: {vetted} is vetted and gone")
            if vetted is not None and after.distrusts(vetted):
                wrong.append(f"{seed}: {what}: {vetted} is vetted and refused")
            if before.vetted is not None and vetted is None and after.distrusted == before.distrusted:
                wrong.append(f"{seed}: {what}: nothing is vetted any more, and no rule says so")
            for name in before.committed:
                if before.distrusts(name) and not after.distrusts(name):
                    wrong.append(f"{seed}: {what}: {name} is refused no longer")
    return wrong


def keep_what_a_rule_refuses(patch: pytest.MonkeyPatch) -> None:
    """A rule leaves `vetted` where it was."""

    def ruled(ref: Ref, rules: Collection[Distrust], write_id: str) -> Ref:
        return dataclasses.replace(ref, distrusted=distrust.with_rules(ref.distrusted, rules), write_id=write_id)

    patch.setattr(refs, "distrusting_ref", ruled)


def vet_what_a_rule_refuses(patch: pytest.MonkeyPatch) -> None:
    """An audit that comes late is believed without asking for rules."""
    decide = refs.decide_vetted

    def believing(ref: Ref | None, kept: Collection[str], target: Target) -> Verdict:
        return decide(ref and dataclasses.replace(ref, distrusted=()), kept, target)

    patch.setattr(refs, "decide_vetted", believing)


def collect_what_is_vetted(patch: pytest.MonkeyPatch) -> None:
    """Retention does not know of it."""
    patch.setattr(Ref, "protected", property(lambda ref: frozenset(ref.committed[:1])))


def keep_the_last_rule_only(patch: pytest.MonkeyPatch) -> None:
    """A second conviction replaces the first one's rule."""
    patch.setattr(refs, "with_rules", lambda rules, more: tuple(itertools.islice(more, 1)))


def test_vetted_is_there_and_sound_in_every_history() -> None:
    """And a rule that was ever there refuses what it refused."""
    assert violations() == []


@pytest.mark.parametrize(
    "plant",
    [keep_what_a_rule_refuses, vet_what_a_rule_refuses, collect_what_is_vetted, keep_the_last_rule_only],
)
def test_a_planted_bug_shows(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake is one that a careless change could make."""
    plant(monkeypatch)
    assert violations()
