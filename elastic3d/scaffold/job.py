"""What a person says about a new job, each part checked by the rules of whatever will read it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from checkpointing.errors import StoreUnfit
from checkpointing.stores.address import parse, redacted
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.etcd import parse_endpoints
from elastic3d.scaffold.places import PLACES, Place

MOST_NODES, MOST_SLOTS = 10_000, 64
LONGEST_NAME = 50
"""A pod's name is that of its Job with its index and five random characters, and a label: at most 63 (RFC 1123)."""

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_NO_TEXT_IN_YAML = re.compile(
    r"[0-9]+(e-?[0-9]+)?|0x[0-9a-f]+|0o[0-7]+|0b[01]+|[0-9]{4}(-[0-9]{1,2}){2}|true|false|yes|no|on|off|y|n|null"
)
"""Labels that YAML 1.1 or 1.2 takes for a number, a date, a truth value or nothing: manifests have names unquoted."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9a-fA-F:]+")
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?")
_COUNTS = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")
_SCHEMES = ("s3", "gs", "az")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job that is to be written. least, most: of nodes, as in --nnodes. store: a folder, or a URL.

    endpoint: of an etcd that is there; "" where the place's own is meant. image, namespace: for Kubernetes.
    """

    name: str
    least: int
    most: int
    slots: int
    store: str
    endpoint: str
    image: str
    namespace: str


def checked(
    place: Place,
    *,
    name: str,
    nodes: str,
    slots: int,
    store: str,
    endpoint: str,
    image: str,
    namespace: str,
) -> NewJob:
    """Return the job of these options, "" for those that were not given; UsageError says which is wrong, and why."""
    least, most = _nodes(nodes)
    if not 1 <= slots <= MOST_SLOTS:
        raise UsageError(f"--slots {slots}: give how many devices a node has, 1 to {MOST_SLOTS}")
    _label("--name", name)
    if name == "etcd" or name.startswith("etcd-"):
        raise UsageError(f"--name {name!r}: etcd's own parts have such names; give another one")
    _label("--namespace", namespace)
    if place in (Place.KUBERNETES, Place.SKYPILOT):
        for option, text in (("--name", name), ("--namespace", namespace)):
            if _NO_TEXT_IN_YAML.fullmatch(text):
                raise UsageError(f"{option} {text!r}: YAML takes it for something other than a name; give another one")
    image = image or f"example.org/{name}:1"
    if not _IMAGE.fullmatch(image) or len(image) > 255:
        raise UsageError(f"--image {image!r}: give an image with its tag, such as example.org/gpt-1b:1")
    if ":" not in image.rpartition("/")[2] or image.endswith(":latest"):
        raise UsageError(
            f"--image {image!r}: give a tag other than latest, or nodes that join later may run another one"
        )
    return NewJob(
        name=name,
        least=least,
        most=most,
        slots=slots,
        store=_store(place, store),
        endpoint=_endpoint(place, endpoint),
        image=image,
        namespace=namespace,
    )


def _label(option: str, text: str) -> None:
    if not _LABEL.fullmatch(text) or len(text) > LONGEST_NAME:
        raise UsageError(
            f"{option} {text!r}: give at most {LONGEST_NAME} lower-case letters, digits and hyphens, with no hyphen at "
            "either end, such as gpt-1b"
        )


def _nodes(text: str) -> tuple[int, int]:
    """Return the least and the most nodes of `8` or `2:8`."""
    match = _COUNTS.fullmatch(text)
    if match is not None:
        least, most = int(match[1]), int(match[2] or match[1])
        if 1 <= least <= most <= MOST_NODES:
            return least, most
    raise UsageError(f"--nodes {text!r}: give how many nodes train, as 8, or the least and the most, as 2:8")


def _store(place: Place, text: str) -> str:
    kind = PLACES[place]
    if not text:
        if kind.store:
            return kind.store
        raise UsageError(f"--store is needed: one that every node reaches, such as s3://bucket/gpt-1b, for {place}")
    try:
        address = parse(text)
    except StoreUnfit as error:
        raise UsageError(f"--store: {error}") from error
    if not text.isprintable():
        raise UsageError(f"--store {text!r}: it has characters that no store's name has")
    if text != redacted(text):
        raise UsageError(
            f"--store {redacted(text)!r}: leave passwords and options out of it, for the script is read by many; "
            "credentials belong into the store's own files"
        )
    if address.path is not None and kind.object_store:
        raise UsageError(
            f"--store {text!r}: machines of {place} share no folder; give an object store, as s3://bucket/x"
        )
    if address.path is not None and place is not Place.LOCAL and not text.startswith(("/", "file://")):
        raise UsageError(f"--store {text!r}: give an absolute path of a folder that every node has")
    if address.path is None and address.scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UsageError(f"--store {text!r}: known are {known} and folders; put any other URL into the script yourself")
    return text


def _endpoint(place: Place, text: str) -> str:
    if not text:
        if PLACES[place].endpoint is None:
            raise UsageError(
                f"--endpoint is needed: for {place}, name an etcd that all machines reach, as e1:2379,e2:2379"
            )
        return ""
    try:
        endpoints = parse_endpoints(text)
    except ConfigurationError as error:
        raise UsageError(f"--endpoint {text!r}: {error}") from error
    for one in endpoints:
        if not _HOST.fullmatch(one.host):
            raise UsageError(f"--endpoint {text!r}: {one.host!r} is no name or address of a machine")
    return ",".join(str(one) if one.tls else one.target for one in endpoints)
