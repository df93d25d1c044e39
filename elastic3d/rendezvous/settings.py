"""The settings in `--rdzv-endpoint`, `--rdzv-id`, `--nnodes` and `--rdzv-conf`, checked once and passed on as a value.

The handler runs in torchrun's agent, the keepers in its workers: the settings travel to them as JSON in the environment
variable `ELASTIC3D_RENDEZVOUS`. Credentials do not: only the path of a password's file does.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from elastic3d import environment, output
from elastic3d.errors import ConfigurationError
from elastic3d.membership.policy import Policy
from elastic3d.notices import options as notice_options
from elastic3d.quantities import NO_TIME, parse_seconds
from elastic3d.rendezvous import torch_options
from elastic3d.rendezvous.labels import labels_of, read_file
from elastic3d.values import from_json, to_json

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

DEFAULT_PORT = 2379
_TIMES = {
    "lease": "lease",
    "grace": "grace",
    "last_call": "first_gather",
    "gather": "gather",
    "timeout": "below_minimum",
    "orphan": "orphan",
    "damping": "damping",
    "quarantine": "quarantine",
    "flap_memory": "flap_memory",
    "change_cost": "change_cost",
}
_DRAIN = "drain"
_KILLED_AFTER = environment.SHUTDOWN_TIMEOUT.name
_COUNTS = ("tries", "multiple_of", "budget", "flaps")
_TEXTS = ("mode", "prefix", "node", "user", "password_file", "ca", "cert", "key", "gate")
KNOWN = (*_TEXTS, *_TIMES, _DRAIN, *_COUNTS, "counts", "labels", "admission", "standby", "chaos", *notice_options.KEYS)
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""One part of an etcd key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One node's rendezvous settings."""

    endpoints: str
    """etcd's servers, as given to `--rdzv-endpoint`."""
    run_id: str
    """torchrun's `--rdzv-id`."""
    mode: str
    """"restart" or "resident"."""
    node: str
    """Name of the node."""
    address: str
    """Where the others reach it."""
    policy: Policy
    """How memberships are formed."""
    prefix: str = "/elastic3d"
    """The beginning of the job's keys in etcd."""
    user: str = ""
    """etcd user, "" for none."""
    password_file: str = ""
    """File with the user's password."""
    ca: str = ""
    """File with the certificates against which etcd's are checked; "" for no TLS."""
    cert: str = ""
    """File with this node's certificate."""
    key: str = ""
    """File with the key of that certificate."""
    gate: str = ""
    """A file for which this node waits, warm, before it joins; "" for none."""
    home: str = ""
    """The machine's name from a scheduler or a label, by which quarantine knows it if `node` is made up at each start.
    "": by `node`."""
    labels: dict[str, str] = field(default_factory=dict)
    """Where the node stands, by level of membership/topology.py."""
    admission: bool = True
    """Whether it checks itself before it joins."""
    standby: bool = True
    """Whether its slots keep a standby, where one trainer holds a device's memory at a time."""
    chaos: bool = False
    """Whether its keeper carries out orders of faults in its own processes (membership/injection.py)."""
    drain: float = 25.0
    """Most seconds that the node takes to leave after SIGTERM or SIGINT."""
    end_seen: int | None = None
    """The result of `end_seen` in membership/driver/ended.py when the agent was started, None if it was not called."""
    notices: notice_options.NoticeOptions = field(default_factory=notice_options.NoticeOptions)
    """Which cloud it asks whether the machine is about to be taken away."""

    @property
    def root(self) -> str:
        """The etcd prefix of all keys of this run."""
        return f"{self.prefix}/{self.run_id}/"

    def password(self) -> str:
        """Return the password, read from its file; ConfigurationError if that cannot be read."""
        try:
            return Path(self.password_file).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(
                f"--rdzv-conf=password_file={self.password_file} cannot be read ({error}): "
                "give the path of a file that this node can read"
            ) from error

    def to_environment(self) -> str:
        """Return the text for `ELASTIC3D_RENDEZVOUS`."""
        return json.dumps(to_json(self))


def from_environment() -> Settings | None:
    """Return the settings of the agent this process belongs to, None outside `mode=resident`."""
    text = environment.RENDEZVOUS.read()
    return from_json(Settings, json.loads(text)) if text else None


def from_parameters(parameters: RendezvousParameters) -> Settings:
    """Return checked settings from torchrun's parameters; ConfigurationError says what to change."""
    given = {str(k): str(v) for k, v in parameters.config.items() if v is not None}
    conf, endpoint, lines = torch_options.translated(given, (parameters.endpoint or "").strip())
    for line in lines:
        output.say(line)
    unknown = sorted(set(conf) - set(KNOWN))
    if unknown:
        raise ConfigurationError(f"--rdzv-conf has unknown key(s) {', '.join(unknown)}; known are {', '.join(KNOWN)}")
    mode = conf.get("mode", "restart")
    if mode not in ("restart", "resident"):
        raise ConfigurationError(f"--rdzv-conf=mode={mode}: choose restart (any script) or resident (elastic3d.run)")
    if mode == "restart":
        # Without keepers that prepare newcomers beside those that train, each late node costs a restart.
        conf.setdefault("last_call", torch_options.LAST_CALL)
    run_id = parameters.run_id
    if not _NAME.fullmatch(run_id or ""):
        raise ConfigurationError(f"--rdzv-id={run_id!r}: use 1 to 128 letters, digits and . _ : -")
    node = conf.get("node") or f"{socket.gethostname()}-{os.getpid()}"
    if not _NAME.fullmatch(node):
        raise ConfigurationError(f"--rdzv-conf=node={node}: use 1 to 128 letters, digits and . _ : -")
    prefix = "/" + conf.get("prefix", "elastic3d").strip("/")
    if not re.fullmatch(r"(/[A-Za-z0-9._:-]{1,128})+", prefix):
        raise ConfigurationError(f"--rdzv-conf=prefix={conf.get('prefix')}: use letters, digits and . _ : - /")
    for one, other in (("cert", "key"), ("user", "password_file")):
        if bool(conf.get(one)) != bool(conf.get(other)):
            raise ConfigurationError(f"--rdzv-conf: {one} and {other} belong together; give both or neither")
    for switch in ("admission", "standby"):
        if conf.get(switch, "on") not in ("on", "off"):
            raise ConfigurationError(f"--rdzv-conf={switch}={conf[switch]}: choose on or off")
    chaos = conf.get("chaos", "off")
    if chaos not in ("allow", "off"):
        raise ConfigurationError(f"--rdzv-conf=chaos={chaos}: choose allow or off")
    if chaos == "allow" and mode == "restart":
        raise ConfigurationError(
            "--rdzv-conf=chaos=allow: in mode restart no keeper is there to carry out an order; add mode=resident, or "
            "leave chaos out"
        )
    if not endpoint:
        raise ConfigurationError("--rdzv-endpoint is missing: give etcd's address, e.g. --rdzv-endpoint=host:2379")
    policy = Policy(
        minimum=parameters.min_nodes,
        maximum=parameters.max_nodes,
        beside=mode == "resident",
        **_numbers(conf),  # type: ignore[arg-type]
    )
    return Settings(
        endpoints=endpoint,
        run_id=run_id,
        mode=mode,
        node=node,
        address=parameters.local_addr or own_address(endpoint),
        policy=policy,
        prefix=prefix,
        # A machine that only has a host name may run several nodes; one that fails says nothing about the others.
        home="" if conf.get("node") else labels_of(conf.get("labels", ""), os.environ, "", read_file).get("host", ""),
        labels=labels_of(conf.get("labels", ""), os.environ, socket.gethostname(), read_file),
        admission=conf.get("admission", "on") == "on",
        standby=conf.get("standby", "on") == "on",
        chaos=chaos == "allow",
        drain=_drain(conf),
        end_seen=None,
        notices=notice_options.from_conf(conf),
        **{name: conf.get(name, "") for name in ("user", "password_file", "ca", "cert", "key", "gate")},
    )


def _numbers(conf: Mapping[str, str]) -> dict[str, float | int | tuple[int, ...]]:
    numbers: dict[str, float | int | tuple[int, ...]] = {}
    for name, time in _TIMES.items():
        if name in conf:
            numbers[time] = _seconds(name, conf[name])
    for name in _COUNTS:
        if name in conf:
            if not re.fullmatch(r"[0-9]{1,9}", conf[name]):
                raise ConfigurationError(f"--rdzv-conf={name}={conf[name]}: give a whole number")
            numbers[name] = int(conf[name])
    if "counts" in conf:
        # Commas separate the settings themselves.
        if not re.fullmatch(r"[0-9]{1,9}(/[0-9]{1,9})*", conf["counts"]):
            raise ConfigurationError(f"--rdzv-conf=counts={conf['counts']}: give whole numbers, as in counts=2/4/8")
        numbers["counts"] = tuple(sorted({int(count) for count in conf["counts"].split("/")}))
    return numbers


def _drain(conf: Mapping[str, str]) -> float:
    """Return the seconds a drain after a signal may take: less than torchrun waits before it kills its workers."""
    killed = float(environment.SHUTDOWN_TIMEOUT.read())
    longest = killed - 2.0
    if _DRAIN not in conf:
        return max(0.0, min(25.0, longest))
    seconds = _seconds(_DRAIN, conf[_DRAIN])
    if not 0 < seconds <= longest:
        raise ConfigurationError(
            f"--rdzv-conf=drain={conf[_DRAIN]}: torchrun kills its workers {killed:g} s after it gets SIGTERM; "
            f"give more than 0 and at most {longest:g} s, or allow torchrun more time by {_KILLED_AFTER}"
        )
    return seconds


def _seconds(name: str, text: str) -> float:
    long = parse_seconds(text)
    if long is None:
        raise ConfigurationError(f"--rdzv-conf={name}={text}: {NO_TIME}")
    return long


def own_address(endpoint: str) -> str:
    """Return the address of this host on the way to etcd, at which the other nodes can reach it.

    That to the first of its endpoints which has one; ConfigurationError if none has. No packet is sent: a UDP socket's
    `connect` only asks the routing table.
    """
    names, failure = list[str](), OSError("no host is named")
    for part in filter(None, map(str.strip, endpoint.split(","))):
        host = re.sub(r"^https?://", "", part)
        name, _, port = host.rpartition(":") if re.search(r":\d+$", host) else (host, "", str(DEFAULT_PORT))
        names.append(name.strip("[]"))
        try:
            family, kind, *_, address = socket.getaddrinfo(names[-1], int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise ConfigurationError(
        f"--rdzv-endpoint={endpoint}: {' and '.join(names) or 'it'} cannot be resolved or reached ({failure}): "
        "check the name, or give this node's own address with --local-addr"
    ) from failure
