"""What the faulty script calls one wrong bit is one, at the pass it is asked for, and on nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chaos.scripts.injectors import blocks, fault, samples
from chaos.scripts.injectors.blocks import FaultyBlock
from chaos.scripts.injectors.fault import LEADER, Fault
from chaos.scripts.injectors.kinds import parse
from chaos.scripts.injectors.samples import HIGH, NAN, STALL, faulty_loss, marks_of
from chaos.scripts.train_gpt import GPT, cross_entropy
from elastic3d.data import Order

STEPS = 7


@pytest.fixture(autouse=True)
def nothing_present() -> Iterator[None]:
    """Compute on one thread, which is enough for so little, and leave nothing that fails."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    Fault.present_one = None


def model() -> tuple[GPT, list[FaultyBlock]]:
    torch.manual_seed(1)
    made = GPT(width=8, blocks=3, context=4, heads=2, dropout=0.0)
    blocks = []
    for block in made.blocks:
        block.__class__ = FaultyBlock
        assert isinstance(block, FaultyBlock)
        blocks.append(block)
    blocks[0].first = True
    return made, blocks


def passes(
    text: str, out: Path, *, rank: int = 1, steps: int = 7, leads: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Run two passes in each of some steps on one rank of four; return the gradients of each pass."""
    made, blocks = model()
    fault = None
    if text:
        fault = Fault.present_one = parse(text, out)
        fault.blocks, fault.world, fault.leads = blocks, 4, lambda: leads
    said = []
    for step in range(STEPS):
        if fault is not None:
            fault.begin(rank, step)
        for number in range(2):
            made.zero_grad()
            made(torch.arange(4)[None] + number).square().sum().backward()
            said.append({name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None})
    return said


def wrong(text: str, out: Path, *, rank: int = 1, leads: bool = False) -> list[tuple[int, str]]:
    """Return the passes, and the first parameter from the loss on, whose gradients are not those of a right rank."""
    right = passes("", out)
    given = passes(text, out, rank=rank, leads=leads)
    return [
        (number, next(name for name in reversed(one) if not torch.equal(one[name], other[name])))
        for number, (one, other) in enumerate(zip(given, right, strict=True))
        if any(not torch.equal(one[name], other[name]) for name in one)
    ]


def test_one_bit_of_a_gradient_is_wrong_once(tmp_path: Path) -> None:
    """Of the weight that is named, in the pass that is named, and of nothing else."""
    right, given = passes("", tmp_path), passes("flip:1@5:1:2", tmp_path)
    unequal = [(n, name) for n, one in enumerate(given) for name in one if not torch.equal(one[name], right[n][name])]
    assert unequal == [(11, "blocks.2.down.weight")]
    bits = given[11]["blocks.2.down.weight"].view(torch.int32) ^ right[11]["blocks.2.down.weight"].view(torch.int32)
    assert bits.flatten().tolist() == [1 << 13] + [0] * (bits.numel() - 1)


@pytest.mark.parametrize(
    ("text", "rank", "at"),
    [
        ("forward:1@5:0:1", 1, [10]),
        ("backward:1@5:1:1", 1, [11]),
        ("sticky:1@5:1", 1, [11, 12, 13]),
        ("liars:1@5:1", 1, [11, 12, 13]),
        ("liars:1@5:1", 2, [10, 11, 12, 13]),
        ("liars:1@5:1", 3, []),
        ("flip:1@5:1", 0, []),
        ("nandevice:1@5:1", 1, [11, 12, 13]),
        ("nandevice:1@5:1", 0, []),
        ("nan:1@5:1", 1, []),
    ],
)
def test_who_computes_wrongly_and_when(text: str, rank: int, at: list[int], tmp_path: Path) -> None:
    """Once, or from then on; two liars, and nobody else."""
    assert [number for number, _ in wrong(text, tmp_path, rank=rank)] == at


@pytest.mark.parametrize("leads", [True, False])
def test_whoever_leads_may_be_meant(leads: bool, tmp_path: Path) -> None:
    """Whatever its rank."""
    assert parse("sticky:leader@5:1", tmp_path).of == LEADER
    assert bool(wrong("sticky:leader@5:1", tmp_path, rank=3, leads=leads)) is leads


def test_it_happens_once_in_the_life_of_a_job(tmp_path: Path) -> None:
    """The generation that follows finds the mark."""
    assert wrong("flip:1@5:1", tmp_path)
    assert not wrong("flip:1@5:1", tmp_path)


@pytest.mark.parametrize("text", ["flip", "nothing:1@5", "flip:1@5:x", "flip:last@5"])
def test_what_is_no_fault_is_refused(text: str, tmp_path: Path) -> None:
    """With the words for those that are."""
    with pytest.raises(ValueError, match="expected KIND:RANK@STEP"):
        parse(text, tmp_path)


def test_samples_that_are_at_fault_are_so_wherever_they_are_computed(tmp_path: Path) -> None:
    """By their positions in the run, and nothing else changes."""
    order = Order(length=900, global_batch=16, micro_batch=2, seed=17)
    faults = [parse("nan:1@5:3", tmp_path), parse("spike:0@7", tmp_path)]
    marks = marks_of(faults, order)
    assert {sample for sample, mark in marks.items() if mark == NAN} == set(order.micro_batch_samples(5, 3))
    assert sum(mark == HIGH for mark in marks.values()) == 3 * 16
    logits, target = torch.randn(2, 4, 256), torch.randint(0, 256, (2, 4))
    well = faulty_loss(logits, target)
    assert torch.equal(well, cross_entropy(logits, target))
    bad = target.clone()
    bad[1, 0] = NAN
    assert faulty_loss(logits, bad).isnan()
    bad[1, 0] = HIGH
    assert faulty_loss(logits, bad) > 5 * well


def test_a_slow_node_takes_as_many_times_as_long_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to what each block's own pass took, and with the same bits."""
    clock = Worked()
    right = passes("", tmp_path)
    for module in (blocks, fault):
        monkeypatch.setattr(module, "SYSTEM", clock)
    monkeypatch.setattr(blocks, "_work", clock.pass_)
    monkeypatch.setattr(FaultyBlock, "work", 1)
    given = passes("slow:1@5:1.5", tmp_path)
    assert all(torch.equal(one[name], other[name]) for one, other in zip(given, right, strict=True) for name in one)
    # Two steps of two passes through three blocks.
    assert clock.slept == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0] * 4


@pytest.mark.parametrize("late", [0.0004, 0.006])
@pytest.mark.parametrize("factor", [1.1, 1.3, 2.0])
def test_sleeps_that_are_too_long_make_a_slow_node_no_slower(
    factor: float, late: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They last half a millisecond more, or until a busy processor is free; a block takes 6.5 ms."""
    clock = Worked(late)
    monkeypatch.setattr(fault, "SYSTEM", clock)
    slow = parse(f"slow:1@5:{factor}", tmp_path)
    slow.slowed = True
    for _ in range(1000):
        slow.computed(0.0065)
    assert clock.now == pytest.approx((factor - 1) * 6.5, abs=0.02)


def test_a_slow_node_that_was_stopped_is_soon_slow_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The minute in which it was stopped is not made up for."""
    clock = Worked(60.0)
    monkeypatch.setattr(fault, "SYSTEM", clock)
    slow = parse("slow:1@5:1.5", tmp_path)
    slow.slowed = True
    slow.computed(0.01)
    clock.late, before = 0.0, clock.now
    for _ in range(100):
        slow.computed(0.01)
    assert clock.now - before == pytest.approx(0.4)


class Worked:
    """A clock that passes by what blocks compute, and by sleeping, `late` seconds longer than asked for."""

    def __init__(self, late: float = 0.0) -> None:
        self.slept: list[float] = []
        self.now, self.late = 0.0, late

    def pass_(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.pass_(seconds + self.late)
        if seconds:
            self.slept.append(seconds)

    def monotonic(self) -> float:
        return self.now

    wall = monotonic


def test_a_data_set_fails_in_the_first_sample_read_from_its_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data is loaded ahead: while that step is made, nothing more may be read."""
    slept: list[float] = []
    monkeypatch.setattr(samples.SYSTEM, "sleep", slept.append)
    stalled = parse("stall:1@5", tmp_path)
    for step in (4, 5):
        stalled.begin(1, step)
        if step == 4:
            stalled.load()
    assert slept == []
    stalled.begin(1, 6)
    stalled.load()
    stalled.load()
    assert slept == [STALL]
    other = parse("stall:1@5", tmp_path / "other")
    other.begin(0, 6)
    other.load()
    assert slept == [STALL]
