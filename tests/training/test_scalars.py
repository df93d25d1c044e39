"""What a script may log, and how the numbers of several ranks become one."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.errors import UsageError
from elastic3d.parallel.all_reduce import reduced
from elastic3d.training import Run, run_alone
from elastic3d.training.scalars import MOST, Scalars
from elastic3d.training.standalone import StandalonePort
from elastic3d.training.tiers import KeepersAndStore
from tests.parallel.logged_mains import STEPS, begun, stop_on_one
from tests.parallel.models import loss_fn
from tests.training.test_falling_back import Keeping

FLOATS = st.floats(allow_nan=False, width=32)


@given(st.lists(FLOATS, min_size=1, max_size=5))
def test_reductions_do_not_depend_on_the_order_of_ranks(values: list[float]) -> None:
    """Sums are exact ones, rounded once; infinities and NaN come through, and nothing raises."""
    for how in ("sum", "mean", "max", "min"):
        results = [reduced(how, order) for order in itertools.permutations(values)]
        assert all(result == results[0] or (math.isnan(result) and math.isnan(results[0])) for result in results)
        assert math.isnan(reduced(how, [*values, math.nan]))
    if all(map(math.isfinite, values)):
        exact = sum(map(Fraction, values), Fraction(0))
        assert reduced("sum", values) == float(exact)


@given(st.floats(allow_nan=False), st.integers(1, 7))
def test_the_mean_of_equal_numbers_is_that_number(value: float, ranks: int) -> None:
    """To the last bit: a learning rate of 0.1 is 0.1 on any number of ranks."""
    assert reduced("mean", [value] * ranks) == value


def test_whole_numbers_are_added_exactly() -> None:
    """Beyond what a float holds."""
    assert reduced("sum", [1 << 53, 1]) == (1 << 53) + 1
    assert reduced("sum", [10**400, 1]) == 10**400 + 1


@pytest.mark.parametrize(
    ("scalars", "reduce", "words"),
    [
        ({"x": "1.0"}, "mean", "x is no number, but str"),
        ({"x": None}, "mean", "x is no number, but NoneType"),
        ({"x": 1j}, "mean", "x is no number, but complex"),
        ({"x": [1.0]}, "mean", "x is no number, but list"),
        ({"x": torch.ones(2)}, "mean", r"x is a tensor of shape \[2\]"),
        ({"x": torch.ones(1)}, "mean", r"x is a tensor of shape \[1\]"),
        ({"x": torch.tensor(1j)}, "mean", "complex64, and not one real number"),
        ({"x": 10**400}, "mean", "x is too large"),
        ({"x": 1.0}, "median", "'median' is none"),
        ({"loss": 1.0}, "mean", "'loss' is a number that elastic3d writes .* 'my_loss'"),
        ({"step": 1.0}, "mean", "'step' is a number that elastic3d writes"),
        ({"_step": 1.0}, "mean", "'_step' is no name"),
        ({"a b": 1.0}, "mean", "'a b' is no name"),
        ({"a\nb": 1.0}, "mean", "is no name"),
        ({"": 1.0}, "mean", "'' is no name"),
        ({"x" * 65: 1.0}, "mean", "is no name"),
        ({f"x{n}": 1.0 for n in range(MOST + 1)}, "mean", f"more than {MOST} names"),
    ],
    ids=str,
)
def test_what_is_no_number_or_no_name_is_refused_by_name(scalars: dict[str, Any], reduce: str, words: str) -> None:
    """At the call, in the script."""
    with pytest.raises(UsageError, match=words):
        Scalars().give(scalars, reduce)


def test_numbers_of_all_kinds_are_taken_as_they_were() -> None:
    """Tensors as they are when they are logged, whatever becomes of them before the vote."""
    scalars, tensor = Scalars(), torch.tensor(0.5, requires_grad=True)
    given = {"a": 1, "b": True, "c": np.float32(0.25), "d": np.int64(7), "e": tensor, "f": torch.tensor(3)}
    scalars.give({**given, "a": 9}, "mean")
    scalars.give({"a": 1}, "mean")
    with torch.no_grad():
        tensor += 1
    assert [float(one) for one in scalars.tensors] == [1.0, 1.0, 0.25, 7.0, 0.5, 3.0]
    assert not any(one.requires_grad for one in scalars.tensors)
    with pytest.raises(UsageError, match="'a' was given with reduce='mean' and with reduce='max'"):
        scalars.give({"a": 2}, "max")


def test_a_script_that_is_started_by_hand_logs_and_stops_likewise() -> None:
    """It trains alone, and needs nothing of a job."""
    run = run_alone(lambda run: assert_three(stop_on_one(run)))
    assert run.ledger[-1].stopped == "it is good enough"
    assert (run.is_first, run.device) == (True, torch.device("cpu"))
    with pytest.raises(UsageError, match="give a reason in words"):
        run.stop(" ")


def assert_three(steps: int) -> None:
    assert steps == 3


def test_numbers_are_logged_while_a_step_is_made() -> None:
    """Else they would be those of the next step, and missing where the run goes on from a state between the two."""

    def main(run: Run) -> None:
        with pytest.raises(UsageError, match="when no step was being made"):
            run.log(x=1)
        model, optimizer, batches = begun(run)
        with pytest.raises(UsageError, match="when no step was being made"):
            run.log(x=1)
        for batch in batches.until(step=STEPS):
            run.log(x=batch.step)
            run.step(optimizer, loss=run.backward(model, batch, loss_fn))
            with pytest.raises(UsageError, match="when no step was being made"):
                run.log(x=1)

    run = run_alone(main)
    port = run._port
    assert isinstance(port, StandalonePort)
    assert [record.logged for record in port.records] == [{"x": step} for step in range(STEPS)]


def test_a_stopped_run_goes_on_from_its_checkpoint_where_the_script_says_so(tmp_path: Path) -> None:
    """Else it makes no step and says why; what was accepted is in the ledger, and once, whatever happens then."""
    first = lived(tmp_path, 1)
    assert (first.steps, first.ledger[-1].stopped) == (3, "it is good enough")
    port = Keeping(tmp_path, 2)
    again = lived(tmp_path, 2, port=port)
    assert (again.steps, port.records) == (3, [])
    assert "the script had stopped the run after step 3: it is good enough" in port.outcome["detail"]
    assert 'run.restore(..., accept="stop")' in port.outcome["detail"]
    more = lived(tmp_path, 3, accept="stop", steps=5)
    assert more.steps == 5
    assert [line.stopped for line in more.ledger] == ["", ""]
    assert more.ledger[-1].changed == "the script had stopped the run after step 3: it is good enough; it goes on"


def lived(folder: Path, generation: int, *, accept: str = "", steps: int = 9, port: Keeping | None = None) -> Run:
    run = Run(port or Keeping(folder, generation), tiers=KeepersAndStore(None))
    stop_on_one(run, accept=accept, steps=steps)
    return run
