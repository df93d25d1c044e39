"""The benchmark of islands: they and synchronous training have results that can be compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.bench.islands import IslandFigures, measured, slow, tasks

pytestmark = pytest.mark.long


@pytest.mark.slow
def test_both_kinds_of_training_have_a_loss_and_islands_send_bytes() -> None:
    """Once per outer step a copy of the parameters, and little more."""
    small = {task.name: replace(task, steps=20, width=16, batch=4) for task in tasks(1)}
    together, apart = measured(small["synchronous"]), measured(small["DiLoCo, H 20"])
    assert 0 < together.loss < 6
    assert 0 < apart.loss < 6
    assert together.bytes == 0
    assert 4 * apart.parameters < apart.bytes < 6 * apart.parameters
    figures = IslandFigures(results={"synchronous": [together], "apart": [apart]})
    assert figures.as_json()["apart"][0]["bytes"] == apart.bytes
    assert len(slow(1, "1MB/s")) == 3
