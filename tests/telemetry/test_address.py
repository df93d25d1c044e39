"""Where telemetry goes is checked where it enters, and so is what the environment says of it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import elastic3d
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.telemetry.address import collector_address, require_sdk


def test_a_word_or_an_address_is_taken() -> None:
    """Paths of the signals are added to an address; the word leaves it to the environment."""
    assert collector_address(None) is None
    one = collector_address("otlp")
    assert one is not None
    assert (one.of("traces"), one.interval, str(one)) == (None, 60.0, "otlp")
    other = collector_address("https://collector.example:4318/otel/")
    assert other is not None
    assert other.of("metrics") == "https://collector.example:4318/otel/v1/metrics"
    secret = collector_address("http://me:word@[fd00::7]:4318")
    assert secret is not None
    assert "word" not in str(secret)


@pytest.mark.parametrize(
    "value",
    [
        "", "OTLP", "collector:4318", "http://", "http://a:0", "http://a:99999", "ftp://a", "http://a b", 4318, True,
        b"otlp",
        "http://a#b", "http://ä:4318", "http://a\n", "http://[::1", "grpc://a:4317", ["otlp"],
    ],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_refused(value: object) -> None:
    """With what to give, before anything is started; a password in it is not shown."""
    with pytest.raises(UsageError, match=r"give 'otlp' for the collector"):
        collector_address(value)
    with pytest.raises(UsageError) as caught:
        collector_address("http://me:secret word@a")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["0", "-1", "60s", "1e3", "86400001", "9" * 5000, "٣"], ids=repr)
def test_an_interval_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is given is taken; set and empty is not set."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", text)
    with pytest.raises(ConfigurationError, match="OTEL_METRIC_EXPORT_INTERVAL"):
        collector_address("otlp")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1500")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    taken = collector_address("otlp")
    assert taken is not None
    assert taken.interval == 1.5


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port for gRPC would answer nothing of use."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigurationError, match="grpc is not spoken here: set it to http/protobuf"):
        collector_address("otlp")


def test_a_missing_package_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install; whether its parents are missing, too, or not. Looking imports none of it."""
    looked = importlib.util.find_spec

    for missing in (None, ModuleNotFoundError):

        def find(name: str, package: str | None = None, missing: type[Exception] | None = missing) -> object:
            if not name.startswith("opentelemetry"):
                return looked(name, package)
            if missing is not None:
                raise missing(name)
            return None

        monkeypatch.setattr("importlib.util.find_spec", find)
        with pytest.raises(ConfigurationError, match=r"pip install 'elastic3d\[otel\]'"):
            require_sdk()
        with pytest.raises(ConfigurationError, match=r"pip install 'elastic3d\[otel\]'"):
            elastic3d.run(lambda run: None, telemetry="otlp")
    monkeypatch.undo()
    before = set(sys.modules)
    require_sdk()
    assert "requests" not in set(sys.modules) - before
