"""The benchmarks of islands: they and synchronous training have results that can be compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.bench import islands_link
from chaos.bench.islands import IslandFigures, measured, tasks
from chaos.bench.islands_link import LINK, LinkFigures, over_link
from chaos.machine.network import Network

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_both_kinds_of_training_have_a_loss_and_islands_send_bytes() -> None:
    """Once per outer step a copy of the parameters, and little more; and overlap does not change how much."""
    small = {task.name: replace(task, steps=20, width=16, batch=4) for task in tasks(1)}
    together, apart = measured(small["synchronous"]), measured(small["DiLoCo, H 20"])
    beside = measured(small["streaming, H 20, 4 fragments, overlap 4"])
    for one in (together, apart, beside):
        assert 0 < one.loss < 6
    assert together.bytes == 20 * 4 * together.parameters
    assert 4 * apart.parameters < apart.bytes < 6 * apart.parameters
    assert 4 * apart.parameters < beside.bytes < 8 * apart.parameters
    figures = IslandFigures(results={"synchronous": [together], "apart": [apart]})
    assert figures.as_json()["apart"][0]["bytes"] == apart.bytes
    assert figures.table().row_count == 2


@pytest.mark.slow
@pytest.mark.netns
def test_over_a_slow_link_all_ways_have_a_rate_and_what_they_sent_is_counted() -> None:
    """Synchronous training sends its gradients in each step, and islands a fraction of that."""
    try:
        with Network():
            pass
    except OSError as error:
        pytest.skip(f"no hosts can be made here: {error}")
    small = [replace(task, steps=20, width=32) for task in islands_link.tasks(1, every=10)]
    figures = LinkFigures(link=LINK, results={task.name: [over_link(task, LINK)] for task in small})
    assert all(one.rate > 0 for all_ in figures.results.values() for one in all_)
    (together,), (apart,) = figures.results["synchronous"], figures.results["DiLoCo, H 10"]
    assert 0 < apart.bytes < together.bytes
    assert figures.table().row_count == len(small)
