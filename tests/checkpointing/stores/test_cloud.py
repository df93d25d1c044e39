"""Clients are made from URLs, options and the environment; nothing is sent."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from checkpointing.errors import StoreUnfit
from checkpointing.stores.cloud import connect

KEYS = {"key": "AKIDEXAMPLE", "secret": "hushhush"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)


def test_fsspec_options_are_understood() -> None:
    """s3fs's names for keys, region, endpoint and anonymous access."""
    client = connect(
        "s3://bucket/a/b/",
        {**KEYS, "token": "t", "endpoint_url": "https://s3.example", "client_kwargs": {"region_name": "eu-west-1"}},
    )
    assert client.prefix == "a/b"
    config: dict[str, Any] = dict(client.config)
    assert config["access_key_id"] == "AKIDEXAMPLE"
    assert config["session_token"] == "t"
    assert (config["region"], config["endpoint"]) == ("eu-west-1", "https://s3.example")
    assert str(config["unsigned_payload"]).lower() == "true"
    assert str(dict(connect("s3://bucket", {"anon": True}).config)["skip_signature"]).lower() == "true"


def test_google_and_azure_clients_are_made() -> None:
    """From the same kind of options."""
    assert "GCSStore" in repr(connect("gs://bucket/a", {"token": "anon"}))
    assert "AzureStore" in repr(connect("az://container/a", {"account_name": "me", "account_key": "a2V5"}))


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9000", "http://localhost:9000", "http://[::1]:9000"])
def test_plain_http_is_allowed_to_this_machine(endpoint: str) -> None:
    """The loopback needs no TLS."""
    connect("s3://bucket", {**KEYS, "endpoint_url": endpoint})


def test_plain_http_to_another_machine_needs_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the endpoint comes from options or the environment; requests are then signed."""
    with pytest.raises(StoreUnfit, match="plain HTTP"):
        connect("s3://bucket", {**KEYS, "endpoint_url": "http://10.0.0.7:9000"})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example:9000")
    with pytest.raises(StoreUnfit, match=r"store\.example"):
        connect("s3://bucket", KEYS)
    client = connect("s3://bucket", {**KEYS, "allow_http": True})
    assert str(dict(client.config)["unsigned_payload"]).lower() == "false"


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://AKID:hushhush@bucket/x", "s3://bucket/x?secret=hushhush"])
def test_a_malformed_store_url_is_refused(url: str) -> None:
    """And no part that may be secret is repeated."""
    with pytest.raises(StoreUnfit, match="name a bucket") as raised:
        connect(url, {})
    assert "hushhush" not in str(raised.value)


def test_an_unknown_option_is_refused() -> None:
    """It is not ignored."""
    with pytest.raises(StoreUnfit, match="sceret"):
        connect("s3://bucket", {"sceret": "x"})


def test_secrets_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Neither in the client's repr nor in what is logged while it is made."""
    caplog.set_level(logging.DEBUG)
    client = connect("s3://bucket", KEYS)
    assert "hushhush" not in repr(client) + caplog.text


def test_shared_credential_files_are_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile gives keys and region if the library that reads profiles is installed."""
    pytest.importorskip("botocore")
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = AKIDLAB\naws_secret_access_key = hushhush\n")
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    client = connect("s3://bucket", {"profile": "lab"})
    assert client.credential_provider is not None
    credential: Any = client.credential_provider()  # type: ignore[call-arg]
    assert credential["access_key_id"] == "AKIDLAB"
    assert dict(client.config)["region"] == "eu-north-1"
