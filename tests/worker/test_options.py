"""A script's checkpoint options, and the errors of invalid ones."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

import elastic3d
from checkpointing import open_store
from checkpointing.errors import StoreUnfit
from elastic3d.errors import UsageError
from elastic3d.quantities import Every, every, rate, size
from elastic3d.values import StoreAt
from elastic3d.worker import options
from elastic3d.worker.options import Checkpointing, RunOptions, saving, store_at


def test_an_interval_is_steps_a_duration_or_continuous() -> None:
    """Continuous means each step for which all ranks are ready."""
    assert every(10, "every") == Every(steps=10)
    assert every(0, "every") == Every()
    assert every("continuous", "every") == Every(steps=1)
    assert every("30s", "every") == Every(seconds=30.0)
    assert every("1.5m", "every") == Every(seconds=90.0)


@pytest.mark.parametrize("value", [-1, True, 1.5, "", "30", "0s", "often", "30 seconds", None, "-3s", "1e9s", "٣s"])
def test_a_malformed_interval_is_refused(value: Any) -> None:
    """The error lists the possible forms."""
    with pytest.raises(UsageError, match=r"every=.*steps.*'30s'.*'continuous'"):
        every(value, "every")


def test_sizes_and_rates_have_units() -> None:
    """Decimal and binary ones, or plain bytes."""
    assert size("100GB", "x") == 100 * 1000**3
    assert size("64 MiB", "x") == 64 << 20
    assert size(4096, "x") == 4096
    assert rate("200MB/s", "x") == 200_000_000
    assert rate(1000, "x") == 1000


@pytest.mark.parametrize("value", ["", "many", "0GB", "-1GB", "1XB", 0, -5, True, 1.5, None, "1 GB/s", "0.0001B"])
def test_a_malformed_size_is_refused(value: Any) -> None:
    """A rate is no size."""
    with pytest.raises(UsageError, match="bytes"):
        size(value, "x")


@pytest.mark.parametrize("value", ["200MB", "fast", "/s", 0, True, "1GB/s/s"])
def test_a_malformed_rate_is_refused(value: Any) -> None:
    """A size is no rate."""
    with pytest.raises(UsageError, match="'200MB/s'"):
        rate(value, "x")


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"codec": "zip"}, "planes"),
        ({"verify": "maybe"}, "sample"),
        ({"keep": 0}, "keep"),
        ({"keep": 2, "keep_every": -1}, "keep_every"),
        ({"keep_every": 100}, "keep="),
        ({"max_bandwidth": "1"}, "200MB/s"),
        ({"keep_bytes": 0}, "keep_bytes=0"),
        ({"keep_bytes": "lots"}, "keep_bytes='lots'"),
        ({"grace": "10d"}, "grace='10d'"),
        ({"grace": "30s"}, "at least 60s"),
        ({"key": 7}, "key=7"),
        ({"cache": b"x"}, "cache=b'x'"),
        ({"cache_limit": "some"}, "cache_limit='some'"),
        ({"tile_bytes": "4"}, "tile_bytes='4'"),
        ({"tile_bytes": "100MiB"}, "256KiB to 64MiB"),
        ({"tile_bytes": 1000}, "256KiB to 64MiB"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(wrong: dict[str, Any], word: str) -> None:
    """By the names in the call."""
    with pytest.raises(UsageError, match=rf"elastic3d\.Checkpointing.*{word}"):
        Checkpointing(**wrong)


def test_a_home_of_nobody_is_refused() -> None:
    """In words, by a run and by the commands."""
    for place in ("~nobody-of-this-name/run", "~nobody-of-this-name"):
        with pytest.raises(UsageError, match=r"knows no such user; write \./~"):
            store_at(place)
        with pytest.raises(StoreUnfit, match=r"knows no such user; write \./~"):
            open_store(place)


def test_a_home_is_meant_wherever_a_script_gives_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants a folder that is called `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    at = store_at("~/run", Checkpointing(cache="~/cache"))
    assert at is not None
    assert (at.url, at.cache) == (f"{tmp_path}/run", f"{tmp_path}/cache")
    with pytest.raises(UsageError, match=r"elastic3d\.run: events='~nobody-here/events': .*no such user"):
        elastic3d.run(lambda run: None, events="~nobody-here/events")
    with pytest.raises(UsageError, match=r"elastic3d\.run: events=7: give a path"):
        elastic3d.run(lambda run: None, events=7)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=rf"{tmp_path}/calibration\.json.*cannot be read"):
        elastic3d.run(lambda run: None, calibration="~/calibration.json")


@pytest.mark.parametrize("wrong", [{"key": "k"}, {"register": "etcd"}, {"cache": "/tmp"}])
def test_store_options_need_a_store(wrong: dict[str, Any]) -> None:
    """Otherwise a user might believe that something is encrypted or cached."""
    with pytest.raises(UsageError, match="store="):
        store_at(None, Checkpointing(**wrong))
    assert store_at(None) is None


def test_a_store_is_a_url_or_any_path() -> None:
    """A path is made absolute at once; a bare name may be a bucket, and is refused."""
    for there in ("stores/x", Path("stores/x"), Path("stores") / "x", f"{os.getcwd()}/stores/x"):
        assert store_at(there) == StoreAt(url=f"{os.getcwd()}/stores/x")
    assert store_at(Path("here")) == StoreAt(url=f"{os.getcwd()}/here")
    assert store_at("s3://bucket/run") == StoreAt(url="s3://bucket/run")
    for empty in ("", 3, b"/tmp/x"):
        with pytest.raises(UsageError, match="give a URL"):
            store_at(empty)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="URL"):
        store_at("bucket")
    with pytest.raises(UsageError, match="etcd"):
        Checkpointing(register="zookeeper")


@pytest.mark.parametrize(("given", "meant"), [(0, 0.0), (1.5, 1.5), ("30s", 30.0), ("2m", 120.0), ("2", 2.0)])
def test_patience_is_a_duration(given: float | str, meant: float) -> None:
    """In seconds or as text; it goes with the store to every process that opens it."""
    at = store_at("/tmp/x", Checkpointing(patience=given))
    assert at is not None
    assert at.patience == meant


@pytest.mark.parametrize("given", [-1, True, "2d", "long", float("inf"), float("nan")])
def test_a_malformed_patience_is_refused(given: Any) -> None:
    """And nothing waits for ever."""
    with pytest.raises(UsageError, match=r"patience.*30s"):
        Checkpointing(patience=given)


def test_the_call_refuses_invalid_options() -> None:
    """Before any process is started."""
    with pytest.raises(UsageError, match="snapshot_every"):
        RunOptions(snapshot_every=-1)
    with pytest.raises(UsageError, match=r"stale_snapshots=4.*8 or more"):
        RunOptions(stale_snapshots=4)
    for nothing in (0, "0s"):
        with pytest.raises(UsageError, match=r"stale_after=0.*above 0"):
            elastic3d.run(lambda run: None, stale_after=nothing)
    with pytest.raises(UsageError, match="stale_after='soon'"):
        elastic3d.run(lambda run: None, stale_after="soon")
    with pytest.raises(UsageError, match="every="):
        elastic3d.run(lambda run: None, store="/tmp/x", every="sometimes")
    with pytest.raises(UsageError, match=r"metrics=9464.*':9464'"):
        elastic3d.run(lambda run: None, metrics=9464)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"/nowhere\.json.*cannot be read"):
        elastic3d.run(lambda run: None, calibration="/nowhere.json")


def test_moved_checkpoint_options_are_refused_with_their_new_place() -> None:
    """All that `run` once took; one that it never took is Python's own error."""
    given: dict[str, Any] = {"keep": 3, "grace": "10m"}
    with pytest.raises(UsageError, match=r"checkpointing=elastic3d\.Checkpointing\(keep=\.\.\., grace=\.\.\.\)"):
        elastic3d.run(lambda run: None, **given)
    unknown: dict[str, Any] = {"colour": "red"}
    with pytest.raises(TypeError, match="colour"):
        elastic3d.run(lambda run: None, **unknown)
    wrong: Any = {"keep": 3}
    with pytest.raises(UsageError, match=r"Checkpointing\(keep=3\)"):
        elastic3d.run(lambda run: None, checkpointing=wrong)


def test_each_checkpoint_option_is_documented() -> None:
    """In a docstring of its own, below the field."""
    [body] = [
        node.body
        for node in ast.parse(inspect.getsource(options)).body
        if isinstance(node, ast.ClassDef) and node.name == "Checkpointing"
    ]
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), ast.unparse(field)
            assert isinstance(after.value, ast.Constant), ast.unparse(field)


def test_options_are_converted_to_internal_units() -> None:
    """Those in which they are counted."""
    given = Checkpointing(
        keep=3, keep_every=100, keep_bytes="1GB", max_bandwidth="2MB/s", verify="all", tile_bytes="16MiB"
    )
    made = saving(given, "30s")
    assert made.tile_bytes == 16 << 20
    assert (made.keep, made.keep_every, made.keep_bytes, made.max_bandwidth) == (3, 100, 10**9, 2 * 10**6)
    assert (made.every, str(made.verification)) == (Every(seconds=30.0), "all")
    at = store_at("/tmp/x", Checkpointing(key=Path("/k"), register="etcd", cache=Path("/c"), cache_limit="1GB"))
    assert at == StoreAt(url="/tmp/x", key="/k", register="etcd", cache="/c", cache_bytes=10**9)


def test_a_script_started_without_torchrun_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It trains alone and names its store, so that nobody finds it empty after a night."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    elastic3d.run(lambda run: None, store=tmp_path / "store")
    said = capsys.readouterr().err
    assert "by hand" in said
    assert f"no checkpoints are written to or read from {tmp_path}/store" in said
