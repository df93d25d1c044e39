"""Which cloud to listen to, from `--rdzv-conf`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from elastic3d.errors import ConfigurationError

KEYS = ("notices", "notices_url", "notices_rebalance")

_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


class Choice(StrEnum):
    """What to listen to; auto: the cloud this machine is in, if any."""

    AUTO = "auto"
    NONE = "none"
    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeOptions:
    """url: another server than the cloud's own, as http(s)://host:port; "" for the cloud's own.

    rebalance: whether EC2's rebalance recommendations are a reason to leave.
    """

    choice: Choice = Choice.AUTO
    url: str = ""
    rebalance: bool = False


def from_conf(conf: Mapping[str, str]) -> NoticeOptions:
    """Return the options that `--rdzv-conf` gives; ConfigurationError says what to change."""
    choice = conf.get("notices", "auto")
    if choice not in tuple(Choice):
        raise ConfigurationError(f"--rdzv-conf=notices={choice}: choose one of {', '.join(Choice)}")
    rebalance = conf.get("notices_rebalance", "log")
    if rebalance not in ("log", "drain"):
        raise ConfigurationError(
            f"--rdzv-conf=notices_rebalance={rebalance}: choose log (EC2 may interrupt this node soon: say so) "
            "or drain (leave then)"
        )
    return NoticeOptions(choice=Choice(choice), url=_url(conf.get("notices_url", "")), rebalance=rebalance == "drain")


def _url(text: str) -> str:
    if not text:
        return ""
    url = text.rstrip("/")
    try:
        parts = urlsplit(url)
        plain = f"{parts.scheme}://{parts.netloc}" == url and "@" not in parts.netloc
        good = plain and parts.scheme in ("http", "https") and _is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # A port that is not a number, or too large; a bracket too many.
        good = False
    if not good:
        raise ConfigurationError(
            f"--rdzv-conf=notices_url={text}: give the address of a metadata server as http://host:port"
        )
    return url


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return _HOST.fullmatch(host) is not None
