"""The code of the guide to samples does what the guide says."""

from __future__ import annotations

from typing import Any

import pytest

from elastic3d.data import Batches
from elastic3d.errors import StateError
from elastic3d.training.state_facts import StateFacts, check_facts
from tests.data.mixing import Numbers
from tests.docs.test_blocks import Language, of


class Images(Numbers):
    """Data with labels."""

    def __init__(self) -> None:
        super().__init__(60)
        self.targets = [number % 3 // 2 for number in range(60)]


class Texts(Numbers):
    """Data of several lengths."""

    def __init__(self) -> None:
        super().__init__(60)
        self.lengths = [100 * number for number in range(1, 61)]


def guide(name: str = "dataset") -> list[Any]:
    """Return what the blocks make under a name, in their order."""
    sources = {"web": 300, "code": 100, "math": 40, "chat": 20}
    names: dict[str, Any] = {source: Numbers(length) for source, length in sources.items()}
    made = []
    for page, block in of(Language.PYTHON):
        if page == "docs/guides/samples.md":
            exec(block, space := {"images": Images(), "texts": Texts(), **names})
            made += [space[name]] if name in space else []
    return made


def test_a_stratified_batch_has_its_shares() -> None:
    """Two thirds and one third of every batch."""
    stratified, *_ = guide()
    order = Batches(stratified, global_batch=6, micro_batch=3, seed=1).order
    for step in range(20):
        labels = [int(stratified.row[sample]) % 3 // 2 for sample in order.samples(*order.positions(step))]
        assert sorted(labels) == [0, 0, 0, 0, 1, 1]


def test_a_mixture_follows_its_schedule() -> None:
    """In a straight line from one stage to the next, and then no more."""
    _, sloping, _ = guide()
    order = Batches(sloping, global_batch=10, micro_batch=5, seed=1).order
    counts = {
        step: [
            after - before
            for (_, before), (_, after) in zip(order.by_source(step), order.by_source(step + 1), strict=True)
        ]
        for step in (0, 500, 1000, 90_000)
    }
    assert counts[0] == [8, 2, 0]
    assert counts[500][2] == 1
    assert counts[1000] == counts[90_000] == [5, 3, 2]


def test_a_run_may_go_on_with_other_weights() -> None:
    """From the step of the further stage on, and not from an earlier state."""
    *_, changed = guide()
    order = Batches(changed, global_batch=10, micro_batch=5, seed=1).order
    before = type(changed)(
        {name: Numbers(length) for name, length in (("web", 300), ("code", 100), ("math", 40))},
        weights={"web": 0.6, "code": 0.3, "math": 0.1},
    )
    old = Batches(before, global_batch=10, micro_batch=5, seed=1).order
    facts = StateFacts(step=40_000, order=old, ledger=(), optimizer_groups=(), schedule=None)
    said = check_facts(facts, 40_000, order)
    assert said == "added chat; from step 40000 on web 0.5, code 0.2, math 0.2, chat 0.1"
    with pytest.raises(StateError, match="Keep the weights up to here"):
        check_facts(facts, 40_001, order)


def test_a_budget_makes_micro_batches_of_what_fits() -> None:
    """Padded to the longest of them, in each step."""
    (size,) = guide("size")
    order = Batches(Texts(), global_batch=20, micro_batch=size, seed=1).order
    for step in range(3):
        for index in range(order.micro_batches_at(step)):
            lengths = [Texts().lengths[sample] for sample in order.micro_batch_samples(step, index)]
            assert max(lengths) * len(lengths) <= 8192
