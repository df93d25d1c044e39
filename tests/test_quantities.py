"""Durations, sizes and rates have one grammar wherever people write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from elastic3d.cli import application
from elastic3d.errors import Elastic3dError, UsageError
from elastic3d.quantities import NO_TIME, parse_seconds, rate, seconds, size, some_seconds
from elastic3d.rendezvous.settings import from_parameters
from elastic3d.worker.options import Checkpointing

UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
NUMBERS = st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,3})?", fullmatch=True)


@given(NUMBERS, st.sampled_from(sorted(UNITS)), st.booleans())
def test_a_duration_is_a_number_and_its_unit(number: str, unit: str, apart: bool) -> None:
    """With or without a space between them; seconds if there is no unit."""
    space = " " if apart and unit else ""
    assert seconds(number + space + unit, "x") == pytest.approx(float(number) * UNITS[unit])


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{0,10}\.?[0-9]{0,3} ?(ms|s|m|h|d)? ?", fullmatch=True))
def test_any_other_text_is_no_duration(text: str) -> None:
    """A duration also has to be shorter than ten years."""
    written = re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?( ?(ms|s|m|h))?", text)
    read = parse_seconds(text)
    if written is None:
        assert read is None
    elif read is None:
        assert float(re.sub("[ msh]", "", text)) > 80_000
    else:
        assert read >= 0


@given(st.integers(1, 9999), st.sampled_from(["B", "kB", "MB", "GiB"]))
def test_a_rate_is_a_size_per_second(number: int, unit: str) -> None:
    """Any size followed by /s is a rate; without /s it is not."""
    if unit == "kB":
        unit = "KiB"
    text = f"{number}{unit}"
    assert rate(f"{text}/s", "x") == size(text, "x")
    with pytest.raises(UsageError):
        rate(text, "x")
    with pytest.raises(UsageError):
        size(f"{text}/s", "x")


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), -0.5, True, None, "88000h", "²s", "1\n"])
def test_durations_are_bounded(value: Any) -> None:
    """Numbers have the same bounds as texts."""
    assert parse_seconds(value) is None


def test_zero_is_refused_where_it_makes_no_sense() -> None:
    """As a lease or a deadline, for example."""
    assert some_seconds("1ms", "--for") == 0.001
    with pytest.raises(UsageError, match="--for='0s': give more than 0"):
        some_seconds("0s", "--for")


def option(text: str) -> None:
    Checkpointing(patience=text)


def setting(text: str) -> None:
    parameters: Any = SimpleNamespace(
        backend="etcd",
        endpoint="127.0.0.1:2379",
        run_id="r",
        min_nodes=1,
        max_nodes=2,
        local_addr="127.0.0.1",
        config={"last_call": text},
    )
    from_parameters(parameters)


def command(text: str) -> None:
    result = CliRunner().invoke(application(), ["ckpt", "gc", "x", f"--grace={text}", "--keep-every=5"])
    assert result.exit_code != 0  # refused, for that reason or another
    raise UsageError(result.stderr)


@pytest.mark.parametrize("enter", [option, setting, command])
@pytest.mark.parametrize(
    ("text", "taken"),
    [(text, True) for text in ("1h", "90m", "1.5h", "30s", "30 s", "500ms", "45")]
    + [(text, False) for text in ("", "1d", "1 hour", "-1s", "1e3", "s", "45 ", "soon", "1h30m", "٣s", "99999h")],
)
def test_every_interface_takes_and_refuses_the_same_durations(
    enter: Callable[[str], None], text: str, taken: bool
) -> None:
    """`--rdzv-conf`, an option of `elastic3d.run` and a command line option, with the same messages."""
    said = ""
    try:
        enter(text)
    except Elastic3dError as error:
        said = str(error)
    assert (NO_TIME in said) is not taken
