"""Predicted against measured: does the planner rank layouts in their real order, and do they fit?

All ranks are processes that share this machine's cores, so that work adds up instead of overlapping; the planner is
told so. The speeds of a core, memory and gloo are measured first, in the same minutes; nothing is fitted to the result.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table

from chaos.bench.planned import Model, in_world, profile_of, run_layout, talk
from chaos.scripts.train_gpt import cross_entropy
from elastic3d.planner import Costs, Device, Link, rank
from elastic3d.values import Layout, ModelProfile, Schedule, to_json

LAYOUTS = (
    Layout(pp=1, dp=1, zero=2),
    Layout(pp=1, dp=2),
    Layout(pp=2, dp=1, schedule=Schedule.ONE_F_ONE_B),
    Layout(pp=1, dp=4),
    Layout(pp=1, dp=4, zero=2),
    Layout(pp=1, dp=4, zero=1),
    Layout(pp=2, dp=2, schedule=Schedule.ONE_F_ONE_B),
    Layout(pp=2, dp=2, zero=2, schedule=Schedule.ONE_F_ONE_B),
    Layout(pp=2, dp=2, schedule=Schedule.GPIPE),
    Layout(pp=4, dp=1, schedule=Schedule.ONE_F_ONE_B),
    Layout(pp=4, dp=1, schedule=Schedule.GPIPE),
    Layout(pp=1, dp=8),
    Layout(pp=1, dp=8, zero=2),
    Layout(pp=2, dp=4, schedule=Schedule.ONE_F_ONE_B),
    Layout(pp=2, dp=4, zero=2, schedule=Schedule.ONE_F_ONE_B),
    Layout(pp=4, dp=2, schedule=Schedule.ONE_F_ONE_B),
)
"""Of 1, 2, 4 and 8 processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One layout, as predicted and as measured; worked: its processor time, over the cores it can use."""

    layout: Layout
    predicted_seconds: float
    seconds: float
    worked: float
    predicted_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All pairs, and how well their orders agree."""

    pairs: tuple[Pair, ...]

    @property
    def spearman(self) -> float:
        """Rank correlation of predicted and measured time."""
        return correlation([pair.predicted_seconds for pair in self.pairs], [pair.seconds for pair in self.pairs])

    @property
    def spearman_worked(self) -> float:
        """Rank correlation of predicted time and processor time, which a busy machine disturbs less."""
        return correlation([pair.predicted_seconds for pair in self.pairs], [pair.worked for pair in self.pairs])

    @property
    def memory_errors(self) -> list[float]:
        """Predicted over measured peak memory, less 1."""
        return [pair.predicted_bytes / pair.memory_bytes - 1 for pair in self.pairs]

    def as_json(self) -> object:
        """Return plain data."""
        return {
            "spearman": self.spearman,
            "spearman_worked": self.spearman_worked,
            "layouts": [to_json(pair) for pair in self.pairs],
        }


def measure(repeats: int, *, say: Callable[[str], None], model: Model | None = None) -> Report:
    """Play every layout `repeats` times, one after the other, and predict each."""
    model = model or Model()
    profile = profile_of(model)
    costs = calibrate(model, profile, say)
    seconds: dict[Layout, list[float]] = {layout: [] for layout in LAYOUTS}
    worked: dict[Layout, list[float]] = {layout: [] for layout in LAYOUTS}
    memory: dict[Layout, list[int]] = {layout: [] for layout in LAYOUTS}
    for number in range(repeats):
        for layout in LAYOUTS:
            measured = run_layout(layout, model)
            # The machine does other things too: the best time is the layout's own.
            seconds[layout].append(min(measured.seconds))
            worked[layout].append(min(measured.worked) / min(layout.world, costs.cores))
            memory[layout].append(run_layout(layout, model, exact=True).memory_bytes)
            say(f"plans {number + 1} of {repeats}: {layout}: {seconds[layout][-1]:.3f} s")
    pairs = []
    for layout in LAYOUTS:
        (predicted,) = [c for c in rank(layout.world, 1, profile, layout, costs).ranking if c.layout == layout]
        pairs.append(
            Pair(
                layout=layout,
                predicted_seconds=predicted.seconds,
                seconds=min(seconds[layout]),
                worked=min(worked[layout]),
                predicted_bytes=predicted.memory_bytes,
                memory_bytes=int(statistics.median(memory[layout])),
            )
        )
    return Report(pairs=tuple(pairs))


def calibrate(model: Model, profile: ModelProfile, say: Callable[[str], None]) -> Costs:
    """Return what one core, its memory and gloo do, each measured by itself on its real sizes."""
    flops = _alone(model, profile)
    small, large = 1 << 12, 1 << 22
    silence, filled = min(in_world(2, talk, large), key=lambda pair: pair[1])
    buffer, target = torch.zeros(1 << 24), torch.zeros(1 << 24)
    copied = 2 * 4 * (1 << 24) / _best(lambda: target.copy_(buffer))
    # A rank's memory before its model: modules imported late, threads, gloo's buffers.
    reserve = run_layout(Layout(pp=2, dp=2), Model(width=16, blocks=model.blocks), exact=True).memory_bytes
    link = Link(latency=silence, bandwidth=(large - small) / max(1e-9, filled - silence))
    say(
        f"one core: {flops / 1e9:.1f} GFLOP/s, memory {copied / 1e9:.1f} GB/s, gloo {silence * 1e3:.2f} ms + "
        f"{link.bandwidth / 1e9:.2f} GB/s, {reserve / 2**20:.0f} MiB for a rank of next to nothing"
    )
    return Costs(
        device=Device(name="core", flops=flops, memory=1 << 40, memory_bandwidth=copied, reserve=reserve),
        inside=link,
        between=link,
        overlap=0.0,
        cores=os.cpu_count() or 1,
    )


def _alone(model: Model, profile: ModelProfile) -> float:
    """Return the FLOP/s of a forward and a backward of the whole model on one core."""
    built = model.build()
    text = torch.zeros(model.micro_batch, model.context, dtype=torch.long)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = _best(lambda: torch.autograd.backward([cross_entropy(built(text), text)]))
    finally:
        torch.set_num_threads(threads)
    flops = profile.first.flops + profile.blocks * profile.block.flops + profile.last.flops
    return 3 * flops / taken


def _best(act: Callable[[], object], times: int = 8) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def correlation(one: list[float], other: list[float]) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def table(report: Report) -> Table:
    """Return the pairs as a table, in the order of what was measured."""
    errors = [abs(error) for error in report.memory_errors]
    title = (
        f"plans: rank correlation with step times {report.spearman:.2f}, with processor time "
        f"{report.spearman_worked:.2f}; peak memory off by "
        f"{100 * statistics.median(errors):.0f} % (median), {100 * max(errors):.0f} % (most)"
    )
    made = Table("layout", "predicted", "measured", "worked", "predicted MiB", "measured MiB", title=title)
    for pair in sorted(report.pairs, key=lambda pair: pair.seconds):
        made.add_row(
            str(pair.layout),
            f"{pair.predicted_seconds:.3f} s",
            f"{pair.seconds:.3f} s",
            f"{pair.worked:.3f} s",
            f"{pair.predicted_bytes / 2**20:.0f}",
            f"{pair.memory_bytes / 2**20:.0f}",
        )
    return made
