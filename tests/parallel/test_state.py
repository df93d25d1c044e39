from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.resolver import Offered
from elastic3d.data import Order
from elastic3d.distrust import Distrust
from elastic3d.errors import NothingLeft, StateError, StateUnfit, UsageError
from elastic3d.parallel import facts
from elastic3d.parallel.numerics.scale import LossScale
from elastic3d.parallel.peer_errors import is_lost_peer
from elastic3d.parallel.state import create_optimizer_state, tiles_of
from elastic3d.training import Run, restoring, run_alone, state_facts
from elastic3d.training.state_facts import AskedState, StateFacts
from elastic3d.values import StoreAt
from tests.parallel.models import Model, Sentences, loss_fn

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(plain_values)
def test_facts_survive_json_exactly(value: Any) -> None:
    """Python's plain values, written as strict JSON and read back, are equal and of the same types."""
    text = json.dumps(facts.encode(value, "x"), allow_nan=False)
    back = facts.decode(json.loads(text))
    assert back == value
    assert repr(back) == repr(value)


def test_unusual_facts_survive_json() -> None:
    """Infinities, NaN, counters and scalar tensors."""
    values = {"lr": torch.tensor(0.1), "best": -math.inf, "milestones": Counter({5: 1}), "betas": (0.9, 0.999)}
    back = facts.decode(json.loads(json.dumps(facts.encode(values, "x"), allow_nan=False)))
    assert back == values
    assert isinstance(back["milestones"], Counter)
    assert back["lr"].dtype == torch.float32
    assert math.isnan(facts.decode(facts.encode(math.nan, "x")))


def test_state_that_cannot_be_written_is_named() -> None:
    """The message says where in the state it is."""
    with pytest.raises(StateError, match=r"LambdaLR.state_dict\(\)\['a'\]\[1\] is function"):
        facts.encode({"a": [1, lambda: None]}, "LambdaLR.state_dict()")


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=9),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=9),
            ],
            milestones=[3],
        ),
    ],
    ids=["cosine", "steps", "one cycle", "lambda", "sequential"],
)
def test_schedules_resume_where_they_were(make: Any) -> None:
    """A fresh schedule and optimizer with the saved facts take the same learning rates to the last bit."""

    def fresh() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.01)
        return optimizer, make(optimizer)

    def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
        taken = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            taken.append(optimizer.param_groups[0]["lr"])
        return taken

    whole = rates(*fresh(), 8)
    optimizer, schedule = fresh()
    rates(optimizer, schedule, 5)
    written = json.loads(json.dumps([facts.optimizer_groups(optimizer), facts.schedule_state(schedule)]))
    optimizer, schedule = fresh()
    facts.set_optimizer_groups(optimizer, written[0])
    facts.set_schedule_state(schedule, written[1])
    assert rates(optimizer, schedule, 3) == whole[5:]


def test_a_schedule_that_does_not_fit_is_named() -> None:
    """A missing or surplus schedule, or another number of groups, is reported and not ignored."""
    with pytest.raises(StateError, match=r"has a schedule and run.restore was given none"):
        facts.set_schedule_state(None, {"last_epoch": 3})
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(StateError, match="2 parameter groups and this optimizer 1"):
        facts.set_optimizer_groups(optimizer, [{}, {}])


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = Sentences()[0]
    loss_fn(model(tokens.unsqueeze(0)), targets.unsqueeze(0)).backward()
    optimizer.step()
    return model, optimizer


def test_tiles_have_global_names_and_share_memory_with_tensors() -> None:
    """Keys name tensors, not ranks; buffers are copied at once, non-persistent ones are no state."""
    model, optimizer = trained()
    tiles = {spec.key: (spec, box, tensor) for spec, box, tensor in tiles_of(model, optimizer)}
    assert "model/blocks.0.up.weight" in tiles
    assert "optimizer/blocks.0.up.weight/exp_avg_sq" in tiles
    assert not any(key.startswith("optimizer/blocks.0.never") for key in tiles)
    step, box, _ = tiles["optimizer/embed.weight/step"]
    assert (step.shape, box) == ((), Box(start=(), stop=()))
    assert tiles["model/embed.weight"][2].data_ptr() == model.embed.weight.data_ptr()
    assert tiles["model/scale"][2].data_ptr() != model.scale.data_ptr()


def test_a_fresh_optimizer_allocates_the_saved_state() -> None:
    """State is made for this rank's parameters alone, and what was not saved is forgotten."""
    model, old = trained()
    specs = [spec for spec, _, _ in tiles_of(model, old)]
    fresh = torch.optim.AdamW(model.parameters())
    create_optimizer_state(
        model, fresh, [*specs, TensorSpec(key="optimizer/elsewhere/step", dtype="float32", shape=())]
    )
    assert {s.key for s in specs} == {s.key for s, _, _ in tiles_of(model, fresh)}
    create_optimizer_state(model, old, [])
    assert not old.state
    one = torch.optim.AdamW([model.head.weight])
    with pytest.raises(StateError, match=r"this optimizer was not given parameter 'embed.weight'"):
        create_optimizer_state(model, one, specs)


def test_an_optimizer_with_numbers_as_state_is_named() -> None:
    """A Python number cannot be moved between layouts."""
    model, optimizer = trained()
    optimizer.state[model.head.weight]["count"] = 3
    with pytest.raises(StateError, match=r"AdamW keeps 'count' of parameter 'head.weight' as int"):
        tiles_of(model, optimizer)


@dataclass(kw_only=True)
class Held:
    spec: TensorSpec
    box: Box
    digest: str = "d" * 64


@dataclass(kw_only=True)
class Stock:
    step: int
    generation: int = 1
    tiles: list[Held] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def offers(self) -> list[Offered]:
        return [Offered(spec=t.spec, box=t.box, digest=t.digest, source="s", where=[self.step]) for t in self.tiles]


W = TensorSpec(key="model/w", dtype="float32", shape=(4, 2))
M = TensorSpec(key="optimizer/w/m", dtype="float32", shape=(4, 2))


KNOWN = restoring.Known(generation=3)


def rows(spec: TensorSpec, start: int, stop: int) -> Held:
    return Held(spec=spec, box=Box(start=(start, 0), stop=(stop, 2)))


def test_the_newest_whole_state_is_chosen() -> None:
    """A newer incomplete state is skipped; replicas beside it do not matter; then the newer generation wins."""
    holed = Stock(step=9, tiles=[rows(W, 0, 2)])
    first, second = Stock(step=8, tiles=[rows(W, 0, 2)]), Stock(step=8, tiles=[rows(W, 2, 4)])
    older = Stock(step=7, tiles=[rows(W, 0, 4)])
    assert restoring.choose([older, holed, first, second, first], [W], KNOWN) == [first, second, first]
    again = Stock(step=8, generation=2, tiles=[rows(W, 0, 4)])
    assert restoring.choose([first, again, second], [W], KNOWN) == [again]
    assert restoring.choose([holed], [W], KNOWN) is None
    assert restoring.choose([], [W], KNOWN) is None


def test_optimizer_state_must_be_complete_too() -> None:
    """Tensors that a snapshot names count even if the model lacks them; steps and generations are not mixed."""
    half = Stock(step=8, tiles=[rows(W, 0, 4), rows(M, 0, 2)])
    rest = Stock(step=8, generation=2, tiles=[rows(M, 2, 4)])
    assert restoring.choose([half, rest], [W], KNOWN) is None
    rest.generation = 1
    assert restoring.choose([half, rest], [W], KNOWN) == [half, rest]
    other = TensorSpec(key="model/w", dtype="float32", shape=(4, 3))
    assert restoring.choose([half, rest], [other], KNOWN) is None


@pytest.mark.parametrize(
    ("step", "generation"),
    [(10**6, 2), (500, 3), (500, 7), (500, 0), (-1, 2)],
    ids=["far ahead", "of the generation that begins", "of one to come", "of none", "of no step"],
)
def test_steps_beyond_the_memberships_knowledge_are_not_believed(step: int, generation: int) -> None:
    """One keeper that claims the highest step does not decide where everybody resumes."""
    true = Stock(step=490, generation=2, tiles=[rows(W, 0, 4)])
    forged = Stock(step=step, generation=generation, tiles=[rows(W, 0, 4)])
    known = restoring.Known(generation=3, newest=492)
    assert restoring.choose([forged, true], [W], known) == [true]
    assert restoring.choose([forged], [W], known) is None


def test_what_spares_hold_that_trained_long_ago_is_believed() -> None:
    """They were taken aside, and hold the last state of those who went on: the sealed record knows of its steps."""
    held = Stock(step=500, generation=2, tiles=[rows(W, 0, 4)])
    known = restoring.Known(generation=3, newest=50, reached=498)
    assert restoring.choose([held], [W], known) == [held]
    assert restoring.choose([held], [W], replace(known, reached=50)) is None


def test_code_that_raised_after_a_step_is_repeated() -> None:
    """The state right behind an error is skipped, as long as nobody has come further."""
    before, behind, further = (Stock(step=step, generation=1, tiles=[rows(W, 0, 4)]) for step in (6, 7, 8))
    failed = restoring.Known(generation=2, newest=7, failed_after=7)
    assert restoring.choose([before, behind], [W], failed) == [before]
    assert restoring.choose([behind], [W], failed) is None
    assert restoring.choose([before, behind, further], [W], failed) == [further]
    assert restoring.choose([before, behind], [W], replace(failed, failed_after=-1)) == [behind]


def test_a_snapshot_may_be_slightly_ahead_of_the_reported_steps() -> None:
    """A rank that died had made the step already; if no keeper trained before, its claim is all there is."""
    ahead = Stock(step=500, generation=2, tiles=[rows(W, 0, 4)])
    assert restoring.choose([ahead], [W], restoring.Known(generation=3, newest=499)) == [ahead]
    assert restoring.choose([ahead], [W], restoring.Known(generation=3)) == [ahead]


class Checkpoints(restoring.Nowhere):
    """Tiers of a store that holds checkpoints of these steps, newest first, and of keepers that hold `stocks`."""

    def __init__(self, steps: list[int], stocks: list[Stock]) -> None:
        self.steps, self.stocks = steps, stocks

    def inventories(self, servers: Sequence[str]) -> Sequence[Stock]:
        return self.stocks

    def checkpoint(
        self, at: StoreAt, wanted: str, damaged: Sequence[str], distrusted: Sequence[Distrust] = ()
    ) -> restoring.Decision | None:
        for step in self.steps:
            if f"of {step}" not in damaged:
                return restoring.Decision(
                    source="store", step=step, checkpoint=f"of {step}", damaged=tuple(damaged), detail="damaged"
                )
        if self.steps:
            raise NothingLeft("none of its checkpoints is whole")
        return None


def test_without_snapshots_code_that_raised_is_repeated_from_an_older_checkpoint() -> None:
    """The only state in memory, and the newest in the store, is right behind the error."""
    behind = Stock(step=40, generation=1, tiles=[rows(W, 0, 4)])
    failed = restoring.Known(generation=2, newest=40, reached=40, failed_after=40, failure="OSError: no such file")

    def decide(steps: list[int], known: restoring.Known) -> restoring.Decision:
        return restoring.decide(Checkpoints(steps, [behind]), ["a:1"], SHELF, [W], known)

    older = decide([40, 20], replace(failed, damaged=("of 30",)))
    assert (older.source, older.step, older.damaged) == ("store", 20, ("of 30",))
    assert older.detail == "the script raised after step 40: from step 20 on all is done again"
    for steps in ([40], []):
        with pytest.raises(StateUnfit, match=r"would be skipped, not done again.*OSError: no such file"):
            decide(steps, failed)
    early = Stock(step=5, generation=1, tiles=[rows(W, 0, 4)])
    known = replace(failed, newest=5, reached=5, failed_after=5)
    begun = restoring.decide(Checkpoints([5], [early]), ["a:1"], SHELF, [W], known)
    assert (begun.source, begun.step) == ("none", 0)
    assert "raised after step 5" in begun.detail
    assert decide([40], replace(failed, failed_after=-1)).step == 40


def test_a_damaged_state_in_memory_is_replaced_by_the_newest_older_one() -> None:
    """Which is in memory, or in the store if that has a newer one."""
    stocks = [Stock(step=step, generation=1, tiles=[rows(W, 0, 4)]) for step in (38, 40)]
    known = restoring.Known(generation=2, newest=40, reached=40, spoilt=((40, 1),))
    older = restoring.decide(Checkpoints([30], stocks), ["a:1"], SHELF, [W], known)
    assert (older.source, older.step) == ("memory", 38)
    assert older.detail == "step 40 is damaged in memory, and there is no good copy: from step 38 on all is done again"
    saved = restoring.decide(Checkpoints([39], stocks), ["a:1"], SHELF, [W], known)
    assert (saved.source, saved.step) == ("store", 39)
    gone = restoring.decide(Checkpoints([30], stocks), ["a:1"], SHELF, [W], replace(known, spoilt=((40, 1), (38, 1))))
    assert (gone.source, gone.step) == ("store", 30)


@pytest.mark.parametrize("whole", [True, False])
def test_a_state_that_is_lost_is_not_begun_anew_because_its_loss_was_an_error(whole: bool) -> None:
    """The error of the try before: what it was raised after is there in no whole copy, and a person decides."""
    stocks = [Stock(step=step, generation=1, tiles=[rows(W, 0, 4 if whole else 2)]) for step in (5, 6)]
    known = restoring.Known(generation=3, newest=6, reached=3, failed_after=6)
    known = replace(known, spoilt=((5, 1), (6, 1)) if whole else ())
    with pytest.raises(StateError, match="step 6 had been made and was held in memory, and nothing is left"):
        restoring.decide(Checkpoints([], stocks), ["a:1"], SHELF, [W], known)
    # The generation after the error knows no more of a step that it was raised after: the newest state is read again.
    again = replace(known, spoilt=(), failed_after=-1)
    if whole:
        assert restoring.decide(Checkpoints([], stocks), ["a:1"], SHELF, [W], again).step == 6
    else:
        with pytest.raises(StateError, match="nothing is left"):
            restoring.decide(Checkpoints([], stocks), ["a:1"], SHELF, [W], again)
    anew = restoring.decide(Checkpoints([], stocks), ["a:1"], SHELF, [W], replace(known, fresh=True))
    assert anew.source == "none"


SHELF = StoreAt(url="file:///x")


class Shelf(restoring.Nowhere):
    """Tiers with given contents."""

    def __init__(self, stocks: list[Stock], saved: restoring.Decision | None) -> None:
        self.stocks, self.saved = stocks, saved

    def inventories(self, servers: Any) -> Any:
        return self.stocks

    def checkpoint(
        self, at: StoreAt, wanted: str, damaged: Sequence[str], distrusted: Sequence[Distrust] = ()
    ) -> restoring.Decision | None:
        return self.saved


def test_memory_is_preferred_to_the_store_and_the_store_to_nothing() -> None:
    """The decision names its source, and survives being broadcast."""
    stock = Stock(step=3, tiles=[rows(W, 0, 4)], facts={"step": 3})
    saved = restoring.Decision(source="store", step=2, generation=1)
    assert restoring.decide(Shelf([stock], saved), ["a:1"], SHELF, [W], KNOWN).source == "memory"
    assert restoring.decide(Shelf([], saved), ["a:1"], SHELF, [W], KNOWN) == saved
    assert restoring.decide(Shelf([], None), ["a:1"], SHELF, [W], KNOWN).source == "none"
    assert restoring.decide(Shelf([stock], saved), [], None, [W], KNOWN).source == "none"
    decision = restoring.decide(Shelf([stock], saved), ["a:1"], None, [W], KNOWN)
    assert restoring.load(restoring.dump(decision)) == decision


RULE = Distrust(before=3, step=6)


def test_states_that_a_rule_refuses_are_passed_over() -> None:
    """In memory and in the store: made before the rule, and beyond the step it names."""
    known = restoring.Known(generation=4, newest=9, reached=4, distrusted=(RULE,))

    def stock(step: int, generation: int = 2) -> Stock:
        return Stock(step=step, generation=generation, tiles=[rows(W, 0, 4)])

    def stored(step: int) -> restoring.Decision:
        return restoring.Decision(source="store", step=step, generation=2)

    def decide(stocks: list[Stock], saved: restoring.Decision | None, at: StoreAt | None = SHELF) -> tuple[str, int]:
        decision = restoring.decide(Shelf(stocks, saved), ["a:1"], at, [W], known)
        assert restoring.load(restoring.dump(decision)) == decision
        assert ("computes wrongly" in decision.detail) == (decision.distrusted >= 0)
        assert "is gone" not in decision.detail or decision.distrusted < 0
        return decision.source, decision.step

    # The state that the rule vouches for, and none after it.
    assert decide([stock(6), stock(7)], None) == ("memory", 6)
    assert decide([stock(7), stock(9, 1)], None) == ("none", 0)
    # What was made again since is as good as any.
    assert decide([stock(9), stock(8, 3)], stored(5)) == ("memory", 8)
    since = restoring.decide(Shelf([stock(9), stock(8, 3)], None), ["a:1"], SHELF, [W], known)
    assert (since.detail, since.distrusted) == ("", -1)
    # Memory that lacks its newest states may be older than the store.
    assert decide([stock(7), stock(3)], stored(5)) == ("store", 5)
    assert decide([stock(7), stock(5)], stored(3)) == ("memory", 5)
    assert decide([stock(7)], stored(5)) == ("store", 5)
    assert decide([stock(7), stock(5)], None, None) == ("memory", 5)
    # Nothing was refused: the loss of a safe step is an error, as ever.
    with pytest.raises(StateError, match="nothing is left of it"):
        decide([], None)
    # A store that refuses all it has says so.
    assert decide([], restoring.Decision(source="none", distrusted=9)) == ("none", 0)
    assert decide([stock(4)], restoring.Decision(source="none", distrusted=9)) == ("memory", 4)


def test_a_store_that_cannot_be_asked_leaves_what_is_in_memory() -> None:
    """It might hold a newer state than memory does after a conviction, and the run is told."""
    known = restoring.Known(generation=3, distrusted=(RULE,))

    class Away(Shelf):
        def checkpoint(self, *arguments: Any) -> restoring.Decision | None:
            raise StateError("the store is away")

    stocks = [Stock(step=step, generation=2, tiles=[rows(W, 0, 4)]) for step in (4, 8)]
    decision = restoring.decide(Away(stocks, None), ["a:1"], SHELF, [W], known)
    assert (decision.source, decision.step) == ("memory", 4)
    assert "the store is away" in decision.detail


def test_a_store_that_is_away_is_not_one_without_an_older_checkpoint() -> None:
    """After an error the newest state is passed over; while nobody can say what else there is, nothing is begun."""
    tries = iter([restoring.Decision(source="store", step=12, checkpoint="of 12")])

    class Away(Shelf):
        def checkpoint(self, *arguments: Any) -> restoring.Decision | None:
            for one in tries:
                return one
            raise StateError("the store is away")

    failed = restoring.Known(generation=2, newest=12, reached=12, failed_after=12)
    with pytest.raises(StateError, match="the store is away"):
        restoring.decide(Away([], None), ["a:1"], SHELF, [W], failed)


@pytest.mark.parametrize("step", [0, 1200])
def test_weights_that_no_run_has_saved_stand_for_the_beginning(step: int) -> None:
    """Whatever step they were imported as: no error came after it, and what a run has made is newer."""
    imported = restoring.Decision(source="store", step=step, checkpoint="imported", facts={})
    stock = Stock(step=18, generation=1, tiles=[rows(W, 0, 4)])
    for failed_after in (0, step):
        known = restoring.Known(generation=2, failed_after=failed_after)
        begun = restoring.decide(Shelf([], imported), ["a:1"], SHELF, [W], known)
        assert (begun.source, begun.step) == ("store", 0)
    spoilt = restoring.Known(generation=2, newest=20, reached=18, spoilt=((20, 1),))
    assert restoring.decide(Shelf([stock], imported), ["a:1"], SHELF, [W], spoilt).step == 18
    lost = restoring.decide(Shelf([], imported), ["a:1"], SHELF, [W], restoring.Known(generation=2, reached=30))
    assert lost.step == 0
    assert lost.detail == "step 30 was in memory that is gone: from step 0 on they are done again"


def test_losing_a_safe_step_for_good_is_an_error() -> None:
    """It says what was lost; a user may choose to restart anyway, and is still told."""
    reached = restoring.Known(generation=3, reached=40)
    for at in (SHELF, None):
        with pytest.raises(StateError, match=r"step 40 had been made.*nothing is left.*fresh=True"):
            restoring.decide(Shelf([], None), ["a:1"], at, [W], reached)
    meant = restoring.decide(Shelf([], None), ["a:1"], None, [W], replace(reached, fresh=True, newest=43))
    assert meant.source == "none"
    assert "up to 43" in meant.detail
    # Nothing was safe yet: a death costs that, and it is reported.
    early = restoring.decide(Shelf([], None), ["a:1"], None, [W], restoring.Known(generation=2, newest=1))
    assert (early.source, early.step) == ("none", 0)
    assert "begins at step 0 again" in early.detail
    assert restoring.decide(Shelf([], None), ["a:1"], None, [W], KNOWN).detail == ""


def test_falling_far_back_to_a_checkpoint_is_reported() -> None:
    """A node and its buddy lost at once cost the steps since the checkpoint, and a person sees it."""
    saved = restoring.Decision(source="store", step=20, generation=1)
    known = restoring.Known(generation=3, reached=1, newest=43)
    decision = restoring.decide(Shelf([], saved), ["a:1"], SHELF, [W], known)
    assert (decision.source, decision.step) == ("store", 20)
    assert "step 43 was in memory that is gone: from step 20 on they are done again" in decision.detail


def facts_of(order: Order, data: str = "") -> StateFacts:
    return StateFacts(step=2, order=order, ledger=(), optimizer_groups=(), schedule=None, data=data)


def test_a_state_of_other_samples_is_refused() -> None:
    """Another data set, batch or seed than the saved run's could not be accounted for; another micro-batch can."""
    order = Order(length=10, global_batch=4, micro_batch=2, seed=1)
    state_facts.check_facts(facts_of(order), 2, Order(length=10, global_batch=4, micro_batch=1, seed=1))
    with pytest.raises(StateError, match=r"trained with global_batch=4 and run.batches now has 8"):
        state_facts.check_facts(facts_of(order), 2, Order(length=10, global_batch=8, micro_batch=2, seed=1))


def test_state_of_another_data_set_is_refused() -> None:
    """As many windows of other files are other samples; a data set without a fingerprint is trusted."""
    order = Order(length=10, global_batch=4, micro_batch=2, seed=1)
    facts = facts_of(order, "old.bin")
    with pytest.raises(StateError, match=r"data set old\.bin and run\.batches now has new\.bin"):
        state_facts.check_facts(facts, 2, order, "new.bin")
    state_facts.check_facts(facts, 2, order, "old.bin")
    state_facts.check_facts(facts, 2, order)


def test_facts_are_read_once_and_what_cannot_be_is_said() -> None:
    """What a run wrote comes back, an older one's too; what no run has written is refused where it enters, in words."""
    order = Order(length=10, global_batch=4, micro_batch=2, seed=1)
    asked = AskedState(
        optimizer="torch.optim.AdamW", schedule="", micro_batch=2, groups=({"lr": 0.1},), schedule_state=None
    )
    whole = replace(facts_of(order, "old.bin"), asked=asked, loss_scale=LossScale(scale=4.0, good=7), begun_from="v2")
    plain = json.loads(json.dumps(state_facts.to_plain(whole)))
    assert state_facts.parse(plain, 2) == whole
    assert (state_facts.begun_from(plain), state_facts.by_a_run(plain)) == ("v2", True)
    older = {name: plain[name] for name in ("step", "order", "ledger", "optimizer_groups", "schedule")}
    assert state_facts.parse(older, 2) == facts_of(order)
    assert "begun_from" not in state_facts.to_plain(facts_of(order))
    with pytest.raises(StateUnfit, match="step 2 has no facts beside its tensors"):
        state_facts.parse(None, 2)
    for wrong in ({**plain, "order": 7}, {**plain, "ledger": [{"generation": "first"}]}, {"order": plain["order"]}):
        with pytest.raises(StateUnfit, match=r"step 2 says beside its tensors cannot be read.* Trying again does not"):
            state_facts.parse(wrong, 2)


def test_calls_in_the_wrong_order_say_what_is_missing() -> None:
    """The call that finds main's mistake reports it."""

    def early(run: Run) -> None:
        run.batches(Sentences(), global_batch=4, micro_batch=2)

    def unrestored(run: Run) -> None:
        model = run.shard(Model)
        optimizer = torch.optim.AdamW(model.parameters())
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        run.restore(model=Model(), optimizer=optimizer, batches=batches)

    def unread(run: Run) -> None:
        model = run.shard(Model)
        optimizer = torch.optim.AdamW(model.parameters())
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=optimizer, batches=batches)
        loss = run.backward(model, next(batches.until(step=1)), loss_fn)
        with pytest.raises(UsageError, match=r"known after run.step"):
            _ = loss.value
        with pytest.raises(UsageError, match=r"the optimizer and the schedule that run.restore was given"):
            run.step(torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
        run.step(optimizer, loss=loss)
        assert f"{loss:.2f}" == f"{loss.value:.2f}"
        assert run.steps == 1
        assert len(run.digest()) == 64

    with pytest.raises(UsageError, match=r"call run.shard before run.batches"):
        run_alone(early)
    with pytest.raises(UsageError, match=r"needs the model of run.shard"):
        run_alone(unrestored)
    run_alone(unread)
    with pytest.raises(UsageError, match='a mapping of module names to styles, or "auto"'):
        run_alone(lambda run: run.shard(Model, tensor="own"))  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match='"ordered" or "fast"'):
        run_alone(lambda run: run.shard(Model, reduction="best"))  # type: ignore[arg-type, return-value]


def test_lost_peers_are_recognised_by_their_cause() -> None:
    """gloo's errors count, also when wrapped; a user's RuntimeError does not."""
    gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    wrapped = RuntimeError("failed to run forward")
    wrapped.__cause__ = gloo
    assert is_lost_peer(gloo)
    assert is_lost_peer(wrapped)
    assert is_lost_peer(torch.distributed.DistNetworkError("timed out"))
    assert not is_lost_peer(RuntimeError("shapes cannot be multiplied"))
    assert not is_lost_peer(ValueError("gloo/"))


def test_a_users_error_is_no_lost_peer() -> None:
    """An error raised by Python code is the user's, whatever it says; one from C++ is recognised by its text."""

    def raised(call: Callable[[], object]) -> RuntimeError:
        with pytest.raises(RuntimeError) as caught:
            call()
        return caught.value

    def users() -> None:
        raise RuntimeError("the label server: Connection reset by peer")

    def again() -> None:
        raise RuntimeError("a batch could not be made") from raised(users)

    # Any C++ function with a message of our choice.
    native = raised(lambda: torch.ones(1).to("Connection closed by peer"))
    assert "Connection closed by peer" in str(native)
    assert is_lost_peer(native)
    assert not is_lost_peer(raised(users))
    assert not is_lost_peer(raised(again))
