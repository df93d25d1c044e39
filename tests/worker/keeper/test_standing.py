"""A node proves itself once, and again after each absence."""

from __future__ import annotations

from elastic3d.port import StepRecord
from elastic3d.worker.keeper.standing import Standing


def record(generation: int, step: int, clean: int) -> StepRecord:
    return StepRecord(
        generation=generation,
        step=step,
        loss=0.0,
        gradient_norm=None,
        seconds=0.1,
        safe_step=-1,
        etcd_away_everywhere=False,
        samples=(0, 1),
        sample_sum=0,
        clean=clean,
    )


def test_an_audit_or_an_exam_proves_a_node_and_steps_alone_do_not() -> None:
    """A generation vouches at its beginning for the state it began with, which says nothing about this node."""
    alone = Standing()
    alone.began(1)
    for step in (1, 2, 3):
        alone.stepped(record(1, step, -1))
    assert alone.newcomer(2)
    audited = Standing()
    audited.began(1)
    audited.stepped(record(1, 11, 10))
    audited.stepped(record(1, 12, 10))
    assert audited.newcomer(2)
    audited.stepped(record(1, 13, 12))
    assert not audited.newcomer(2)
    examined = Standing()
    examined.began(1)
    examined.examined(1)
    assert not examined.newcomer(2)


def test_whoever_was_away_is_a_newcomer_again() -> None:
    """As a spare, in quarantine, or where others went on without it."""
    node = Standing()
    node.began(1)
    node.examined(1)
    node.began(2)
    assert not node.newcomer(3)
    assert node.newcomer(4)
    node.began(4)
    assert node.newcomer(5)
    node.examined(2)
    assert node.newcomer(5), "of another generation"
