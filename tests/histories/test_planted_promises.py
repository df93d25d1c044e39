"""A promise that is broken on purpose is missed by no judge: drawn schedules find it, and are made small."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.histories.test_random_storms import Chaos, chaos, drawn

__all__ = ["chaos"]

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(1200)]

PLANTED = Path(__file__).parent / "scripts" / "planted.py"
RUNS = 2
"""Within so many runs each is found."""
NODES = "kill,kill-trainer,join,drain,etcd-compact,revoke"
OUTAGES = "join,etcd-pause,etcd-restart"


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A promise that is broken on purpose. name: what `scripts/planted.py` does; promise: what is judged to be broken.

    faults: of the schedules. options: more of the command's; given: more of the script's. every: steps between
    checkpoints. steps: of the job. seen: what is said of it, in part.
    """

    name: str
    promise: str
    faults: str = NODES
    options: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    every: int = 5
    steps: int = 24
    seen: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.promise}"


PLANTS = (
    Plant(
        name="stands",
        promise="the job never stands still for good",
        options=("--patience=60",),
        seen="(reference/failures.md): no node has written an event for 60 s, and node",
    ),
    Plant(name="exits", promise="a node that nobody kills ends well", faults="join,drain,etcd-compact,revoke"),
    Plant(name="raises", promise="nothing that happens makes the script raise"),
    Plant(
        name="mute",
        promise="what has to end by a fault ends, by an error that says why",
        faults="kill-below",
        options=("--each=1",),
        seen="ended by another error: planted",
    ),
    Plant(name="early", promise="the job makes all its steps"),
    Plant(name="ends", promise="every fault of the schedule comes to pass"),
    Plant(name="unsaved", promise="the last step is saved"),
    Plant(name="damage", promise="every checkpoint that was committed can be restored"),
    Plant(name="repeats", promise="a planned change of nodes repeats no step", faults="join,drain"),
    Plant(
        name="noise",
        promise="a step that is made again has the same bits",
        faults="kill,kill-trainer",
        given=("--snapshot-every=6", "--pause=0.1"),
        every=6,
    ),
    Plant(name="skips", promise="every sample is consumed once"),
    Plant(
        name="usurps",
        promise="a generation has one committer: who was followed by another one commits no more",
        faults="kill-trainer,join,etcd-compact",
        given=("--pause=0.2",),
        every=3,
        # A generation has to be of several checkpoints: those of its leader, another's, and again its leader's.
        steps=48,
    ),
    Plant(name="alarm", promise="nobody is named as being at fault to whom nothing was done", faults=OUTAGES),
    Plant(
        name="buries",
        promise="a node is taken for dead only where something was done that may end it",
        faults=OUTAGES,
        seen="wrote peer.lost of another",
    ),
    Plant(
        name="crashes",
        promise="a generation ends only where something was done that may end it",
        faults="etcd-pause,store-gone",
        options=("--each=2", "--seed=5"),
        given=("--pause=1",),
    ),
    Plant(
        name="forgets",
        promise="only steps since the newest snapshot are made again",
        faults="kill-trainer",
        options=("--each=1",),
        given=("--pause=0.2",),
    ),
    Plant(
        name="unheard",
        promise="every fault is noticed by what the catalogue names",
        faults="drain",
        options=("--each=1",),
        given=("--pause=1",),
        seen="no node.draining of it",
    ),
    Plant(name="left", promise="nothing is left behind", faults=OUTAGES),
    Plant(name="noise", promise="whatever happens, the bits are those of a run that nothing happens to"),
    Plant(
        name="unheard",
        promise="a fault is noticed within 1 times its bar",
        faults="kill,join,etcd-compact",
        options=("--bars=1",),
        given=("--pause=0.3",),
    ),
    Plant(name="dawdles", promise="the next step comes within 15 s of a fault", options=("--recovery=15",)),
)


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_promise_broken_on_purpose_is_found_and_its_schedule_made_small(
    plant: Plant, chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four faults at most three are left. What is broken may bring other promises down, too."""
    monkeypatch.setenv("PLANTED", plant.name)
    options = ["--seed=3", f"--runs={RUNS}", "--each=4", "--nodes=3", f"--faults={plant.faults}", *plant.options]
    code, document = drawn(chaos, PLANTED, options, steps=plant.steps, every=plant.every, given=plant.given)
    assert code == 1, document
    failed = next(run for run in document["runs"] if run["broken"])
    verdict = json.loads(Path(failed["folder"], "verdict.json").read_text())
    assert plant.promise in {one["says"] for one in verdict["promises"] if one["broken"]}, verdict
    assert any(text.startswith(plant.promise) and plant.seen in text for text in failed["broken"]), failed
    code, shrunk = chaos("shrink", failed["folder"], "--tries=8")
    assert code == 0, shrunk
    assert len(shrunk["faults"]) <= 3, shrunk
