"""What events about numbers, devices and state mean for a person, in words: a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic3d.health.hearing import Compared


class TroubleKind(StrEnum):
    """Of what kind a trouble is: `Explanation.kind`."""

    NUMBERS = "numbers"
    LYING = "lying"
    EXAM = "exam"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What one event means. "{nodes}" stands for the names of those at fault. Without `done`, the event says it."""

    kind: TroubleKind
    fault: str
    why: str
    done: str
    todo: tuple[str, ...]
    weight: int = 0
    """Which of several in one generation is explained: the heaviest, and of these the newest."""


_LOOK = "look at the device of {nodes}: its memory errors, its temperature, its driver's log; try `elastic3d doctor`"
_OUT = "its machine is set aside for a day; `elastic3d release {nodes}` takes it back once the device is replaced"

MEANINGS: Mapping[str, Meaning] = {
    "batch.excluded": Meaning(
        kind=TroubleKind.NUMBERS,
        fault="samples whose numbers are not finite",
        why="the passes were made again, each micro-batch by itself, and by other nodes where there are any",
        done="these samples are left out for good, and the step was made of the others; what follows keeps its step",
        todo=(
            "look at these samples: empty or corrupt ones, targets out of range, a loss that divides by zero",
            "run.batches(exclude=) leaves the same positions out of a run from its beginning",
        ),
        weight=2,
    ),
    "run.rolled_back": Meaning(
        kind=TroubleKind.NUMBERS,
        fault="the loss jumped up",
        why="three of five losses were half as much again as the median of the last 128, and 8 usual spreads above it",
        done="the run went back to a state of before, and these positions are left out for good",
        todo=(
            "look at the samples that are left out, and whether the learning rate had just been raised",
            "if it comes again it is not single samples: a run goes back at most three times in 10,000 steps",
        ),
        weight=4,
    ),
    "loss.spiked": Meaning(
        kind=TroubleKind.NUMBERS,
        fault="the loss jumped up",
        why="three of five losses were half as much again as the median of the last 128, and 8 usual spreads above it",
        done="nothing: the run goes on",
        todo=(
            "look at the samples of the last steps, and whether the learning rate had just been raised",
            "to go back: restore= names an older checkpoint, and exclude= leaves out what led to it; "
            'Health(spike="rollback") does both',
        ),
        weight=1,
    ),
    "node.lying": Meaning(
        kind=TroubleKind.LYING,
        fault="a device computes wrongly",
        why="two ranks on two other nodes agree bit for bit, and it differed from them again; where only two could be "
        "asked, it alone erred in a product whose result is known, or it had just come",
        done="the step was not made with it",
        todo=(_LOOK, _OUT),
        weight=5,
    ),
    "exam.failed": Meaning(
        kind=TroubleKind.EXAM,
        fault="a node failed its entrance exam",
        why="before its first step it computed the same micro-batch as all others, and came to other bits",
        done="no step was made with it, and no state is doubted",
        todo=(_LOOK, _OUT),
        weight=6,
    ),
    "audit.inconclusive": Meaning(
        kind=TroubleKind.LYING,
        fault="ranks came to other bits, and nobody can be blamed",
        why="nobody is convicted but by two ranks on two other nodes that agree with each other",
        done="training went on, with what may be wrong",
        todo=(
            "with three data-parallel ranks on three nodes somebody can be blamed",
            "if nobody is named though there are enough: an operation of the model is not deterministic; find it with "
            "torch.use_deterministic_algorithms(True) and audit=100% in a short run",
        ),
        weight=3,
    ),
    "audit.failed": Meaning(
        kind=TroubleKind.LYING,
        fault="ranks came to other bits",
        why="two ranks ran the same micro-batch, and others repeated it",
        done="the step's passes were made again before its update",
        todo=("one accident may be a cosmic ray: {nodes} is set aside if it happens again within an hour",),
        weight=2,
    ),
    "step.redone": Meaning(
        kind=TroubleKind.LYING,
        fault="something went wrong once",
        why="the same passes came to other numbers when they were made again",
        done="the step was made of the new passes",
        todo=("one accident may be a cosmic ray; if it happens often on one node, look at its device",),
        weight=1,
    ),
    "state.altered": Meaning(
        kind=TroubleKind.STATE,
        fault="bits changed in memory",
        why="parameters or the optimizer's state differ from their own copy, though nothing wrote to them",
        done="",
        todo=(_LOOK, "a second time within an hour sets the node aside"),
        weight=4,
    ),
    "update.wrong": Meaning(
        kind=TroubleKind.STATE,
        fault="an update was computed wrongly",
        why="a piece of the optimizer's update came to other bits when other nodes computed it again",
        done="",
        todo=(_LOOK, "a second time within an hour sets the node aside"),
        weight=4,
    ),
    "vote.split": Meaning(
        kind=TroubleKind.STATE,
        fault="ranks left a vote with different outcomes",
        why="the next vote carries a digest of the last one's outcome, and they are not all the same",
        done="",
        todo=("look at the network and the memory of {nodes}: what was sent is not what arrived",),
        weight=4,
    ),
}
"""What each event means."""

_ENDS = (
    "one accident may be a cosmic ray, and which end it was neither of them can tell",
    "if it comes again, look at the network between {nodes}, and at the memory of both; a node is set aside once it is "
    "an end of every link that failed within an hour, towards three others",
)
_FAILED, _LYING, _UNCERTAIN = MEANINGS["audit.failed"], MEANINGS["node.lying"], MEANINGS["audit.inconclusive"]
_LINKS = "what a node sends or receives arrives as something else"

EXCHANGED: Mapping[tuple[str, str], Meaning] = {
    ("audit.failed", Compared.TRANSIT): replace(
        _FAILED,
        fault="a piece of a gradient changed on its way between two ranks",
        why="both ends add up digests of all that one of them sends the other, and these differ",
        todo=_ENDS,
    ),
    ("audit.failed", Compared.WEIGHTS): replace(
        _FAILED,
        fault="a weight that a rank had gathered is not what its owner has",
        why="the owner of each part digests it as it is sent, and who has gathered it what it computed with",
        todo=(
            "one accident may be a cosmic ray",
            "if it comes again, look at the memory of {nodes} and at its network; a node is set aside once it is an "
            "end of every link that failed within an hour, towards three others",
        ),
    ),
    ("audit.failed", Compared.SUM): replace(
        _FAILED,
        fault="a sum of gradients was added up wrongly",
        why="a rank of another node added up a part of it again from the same pieces, and then all others did",
    ),
    **{
        ("node.lying", compared): replace(
            _LYING,
            fault=_LINKS,
            why="it is an end of every link that failed within the last hour, and the other ends are of three nodes",
            todo=("look at the network of {nodes}: its card, its cable, its driver's log; and at its memory", _OUT),
        )
        for compared in (Compared.TRANSIT, Compared.WEIGHTS)
    },
    **{
        ("audit.inconclusive", compared): replace(
            _UNCERTAIN,
            fault="what one rank sends another arrives as something else, again and again",
            why="which end is at fault neither of them can tell, and there are too few others",
            todo=(
                "look at the network between the nodes of these ranks, and at the memory of both",
                "with four nodes, the one that is an end of every link that fails can be blamed",
            ),
        )
        for compared in (Compared.TRANSIT, Compared.WEIGHTS)
    },
}
"""What those of audits mean that are not about passes, by event and what was compared."""


def meaning_of(event: str, compared: str) -> Meaning:
    """Return what an event means. compared: over what ranks differed, as the event says it."""
    return EXCHANGED.get((event, compared), MEANINGS[event])


ENDING = ("run.rolled_back", "node.lying", "exam.failed", "state.altered", "update.wrong", "vote.split")
"""Events upon which a generation ends."""
