"""What can happen to a script that torchrun restarts, and what is refused or left out by its name."""

from __future__ import annotations

import pytest

from chaos.faults.catalogue import KINDS
from chaos.faults.fault import Fault
from chaos.faults.memory import SnapshotFlip
from chaos.faults.moment import Phase, When
from chaos.faults.orders import Join
from chaos.faults.process import Kill, KillTemplate, Pause
from chaos.machine.processes import Part
from chaos.schedules.restart import WHY, WORDS, check_restart
from chaos.storms.random_runs import Chances, draw_run, words_of
from chaos.storms.storm import Job
from elastic3d.errors import UsageError

AT = When(step=5)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (KillTemplate(node="node1", when=AT), r"^kill-template node1@5: it is not for --mode restart"),
        (SnapshotFlip(node="node1", when=AT), r"^flip-snapshot node1@5: it is not for --mode restart"),
        (Pause(node="node1", part=Part.KEEPERS, when=AT), "a node has no keepers; give agent or trainers"),
        (Join(when=When(generation=2, phase=Phase.RESTORED)), "nobody sees that phase; give sealed or stepped"),
        (Join(when=When(event="rank.stuck")), r"nobody writes rank\.stuck; give generation\.sealed"),
    ],
)
def test_what_needs_more_than_a_script_is_refused(fault: Fault, message: str) -> None:
    """Faults, parts, phases and events, each with what can be given in its place."""
    with pytest.raises(UsageError, match=message):
        check_restart([fault])


def test_steps_are_moments_of_a_script_that_tells_them() -> None:
    """Of one that does not, generations are, and the events that others write of it."""
    untimed = [Join(when=When(generation=1)), Kill(node="node1", when=When(event="member.joined", count=4))]
    check_restart([*untimed, Kill(node="node2", when=AT)])
    check_restart([*untimed, Kill(node="node2", when=AT)], steps=20)
    check_restart(untimed, steps=0)
    with pytest.raises(UsageError, match=r"kill node2@5: the script tells no step; have it print lines such as"):
        check_restart([*untimed, Kill(node="node2", when=AT)], steps=0)


def test_nothing_is_drawn_that_would_be_refused() -> None:
    """And all that is left out is named; what a person names is refused at once."""
    words, left_out = words_of("", 1, resident=False)
    assert {"kill", "join", "pause", "etcd-pause"} <= {*words} <= {*WORDS}
    assert {one.fault for one in left_out if one.why == WHY} == {*KINDS} - {*WORDS}
    chances = Chances(words=words, each=(2, 3), nodes=4, steps=60)
    job = Job(script="train.py", seed=7, conf={"mode": "restart"})
    for seed in range(60):
        check_restart(draw_run(seed, chances, job)[0].faults, steps=60)
    with pytest.raises(UsageError, match="--faults flip-snapshot: it is not for --mode restart"):
        words_of("kill,flip-snapshot", 1, resident=False)
