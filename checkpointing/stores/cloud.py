"""obstore clients from URLs, fsspec's options and the usual environment.

The options are those that s3fs, gcsfs and adlfs take (`key`, `secret`, `token`, `anon`, `endpoint_url`, `profile`,
`client_kwargs`, `account_name`, ...), and obstore's own configuration keys. Credentials come from them or from the
places where each cloud's tools look: the environment, shared files and profiles, the machine's own identity. By default
nothing is retried here: a conditional write that was repeated below us would fail against itself. With a patience, as
for uploads in parts, each request is retried.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from checkpointing.errors import StoreUnfit
from checkpointing.stores.address import redacted

if TYPE_CHECKING:
    from obstore.store import RetryConfig

Client = S3Store | GCSStore | AzureStore


_RENAMED = {
    "s3": {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token", "endpoint_url": "endpoint"},
    "gs": {"endpoint_url": "base_url", "token": "application_credentials"},
    "az": {"sas_token": "sas_key", "endpoint_url": "endpoint"},
}
_MANY = 1 << 20  # time is what ends it
_CONNECT = timedelta(seconds=10)
_REQUEST = timedelta(seconds=120)  # a part of 16 MiB takes this long at 140 KB/s


def connect(url: str, options: Mapping[str, Any], *, patience: float = 0.0) -> Client:
    """Return a client for the bucket and prefix of `url`; StoreUnfit says which part of URL or options is wrong.

    patience: seconds for which each request is repeated, with random waits, while the store is busy or away.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    family = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}.get(scheme, scheme)
    if not bucket or "@" in bucket or "?" in url:
        raise StoreUnfit(
            f"store {redacted(url)}: name a bucket and a prefix, and nothing else, as in {scheme}://bucket/prefix"
        )
    config, http = _config(family, options)
    endpoint = _endpoint(family, config)
    plain = endpoint is not None and urlsplit(endpoint).scheme == "http"
    loopback = endpoint is not None and is_loopback(urlsplit(endpoint).hostname or "")
    if plain and not (loopback or http):
        raise StoreUnfit(
            f"store {url}: {_host(endpoint)} is spoken to over plain HTTP, where anybody on the way can read and "
            "change what is stored. Use https://, or give the option allow_http=True."
        )
    client: dict[str, Any] = {"connect_timeout": _CONNECT, "timeout": _REQUEST, "allow_http": plain}
    given: dict[str, Any] = {
        "prefix": prefix.strip("/") or None,
        "client_options": client,
        "retry_config": _retries(patience),
    }
    try:
        if family == "s3":
            # Over TLS the payload cannot be changed, so that hashing it for the signature would only cost time.
            config.setdefault("unsigned_payload", not plain or loopback)
            config.setdefault("disable_bulk_delete", True)
            return S3Store(bucket, config=config, credential_provider=_shared_credentials(config, options), **given)
        if family == "gs":
            return GCSStore(bucket, config=config, **given)
        return AzureStore(bucket, config=config, **given)
    except (BaseError, ValueError, TypeError) as error:
        raise StoreUnfit(f"store {url}: cannot be opened: {first_line(error)}") from error


def _retries(patience: float) -> RetryConfig:
    if not patience:
        return {"max_retries": 0}
    # Waits are random, between the first and `base` times the previous one.
    return {
        "max_retries": _MANY,
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 2},
        "retry_timeout": timedelta(seconds=patience),
    }


def first_line(error: BaseException) -> str:
    """Return the message of an obstore error, without its dump of internals."""
    return str(error).partition("\n\nDebug source")[0].strip()


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, by its name alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _config(family: str, options: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return obstore's configuration, and whether plain HTTP was asked for."""
    config: dict[str, Any] = {}
    flat = {**options, **dict(options.get("client_kwargs") or {})}
    flat.pop("client_kwargs", None)
    flat.pop("profile", None)
    http = bool(flat.pop("allow_http", False)) or flat.pop("use_ssl", True) is False
    http = http or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    for name, value in flat.items():
        if value is None:
            continue
        if name == "anon" or (family == "gs" and name == "token" and value == "anon"):
            config["skip_signature"] = name != "anon" or bool(value)
        elif name == "region_name":
            config["region"] = value
        else:
            config[_RENAMED[family].get(name, name)] = value
    return config, http


def _endpoint(family: str, config: Mapping[str, Any]) -> str | None:
    names = {"s3": ("aws_endpoint_url_s3", "endpoint"), "gs": ("base_url",), "az": ("endpoint",)}[family]
    for name in names:
        if config.get(name):
            return str(config[name])
    variables = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("GOOGLE_BASE_URL",),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }
    return next((os.environ[name] for name in variables[family] if os.environ.get(name)), None)


def _host(endpoint: str | None) -> str:
    return urlsplit(endpoint or "").hostname or "the endpoint"


def _shared_credentials(config: Any, options: Mapping[str, Any]) -> Any:
    """Return a provider that reads what the AWS tools read; None if obstore's own way is right.

    obstore knows the environment, web identities and the machine's own identity; profiles, shared files and single
    sign-on need botocore.
    """
    given = "access_key_id" in config or config.get("skip_signature") or os.environ.get("AWS_ACCESS_KEY_ID")
    profile = options.get("profile")
    if given and not profile:
        return None
    try:
        import botocore.session
    except ImportError:
        if profile or os.environ.get("AWS_PROFILE"):
            raise StoreUnfit(
                "an AWS profile is named, and botocore, which reads profiles, is not installed; install it, or set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        return None
    session = botocore.session.Session(profile=profile)
    # The machine's own identity is left to obstore, which asks for it only when it is needed.
    chain = session.get_component("credential_provider")
    for name in ("iam-role", "container-role", "assume-role-with-web-identity"):
        chain.remove(name)
    try:
        credentials = session.get_credentials()
        region = session.get_config_variable("region")
    except botocore.exceptions.BotoCoreError as error:
        raise StoreUnfit(f"AWS credentials cannot be read: {error}") from error
    if region and not os.environ.get("AWS_REGION"):
        config.setdefault("region", region)
    if credentials is None:
        return None

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        expires = getattr(credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires,
        }

    return provide
