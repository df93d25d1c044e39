"""What all ranks of a world come to alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from elastic3d.data import Batch
from elastic3d.training import Run
from elastic3d.values import Layout
from tests.parallel.worlds import Orders, Report, run_world


def finished(main: Callable[..., Any], layout: Layout | str, **orders: Any) -> list[Report]:
    """Run a world that every rank ends well, and return what they report."""
    at = Layout.parse(layout) if isinstance(layout, str) else layout
    reports = run_world(main, Orders(layout=at, **orders))
    for report in reports:
        assert report.ended == "done", report.error
    return reports


def result(main: Callable[..., Any], layout: Layout | str, **orders: Any) -> Any:
    """Return what all ranks return alike, having voted on the same samples."""
    reports = finished(main, layout, **orders)
    assert {repr(report.result) for report in reports} == {repr(reports[0].result)}
    samples = [[(r.samples, r.sample_sum) for r in report.records] for report in reports]
    assert all(seen == samples[0] for seen in samples)
    return reports[0].result


def carried_on(main: Callable[..., Any], layouts: Sequence[str], folder: Path) -> Any:
    """Return what the last of these worlds returns, each of which goes on where the one before has left off."""
    took: Path | None = None
    reports: list[Report] = []
    for number, text in enumerate(layouts):
        layout, kept = Layout.parse(text), folder / str(number)
        kept.mkdir()
        leave = dict.fromkeys(range(layout.world), 0) if number < len(layouts) - 1 else {}
        reports = run_world(main, Orders(layout=layout, keep=kept, take=took, leave_at=leave))
        assert {report.ended for report in reports} == {"left" if leave else "done"}, reports[0].error
        took = kept
    assert {repr(report.result) for report in reports} == {repr(reports[0].result)}
    return reports[0].result


def trained(
    run: Run, model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch], loss_fn: Any
) -> tuple[str, list[float], list[float]]:
    """Make these steps with clipping; return digest, losses and norms."""
    losses = []
    for batch in batches:
        loss = run.backward(model, batch, loss_fn)
        run.step(optimizer, loss=loss, clip=0.5)
        losses.append(loss.value)
    return run.digest(), losses, [record.gradient_norm for record in run._port.records]  # type: ignore[attr-defined]
