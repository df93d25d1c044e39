"""What every member of an etcd says of itself, and what follows from all of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic3d.errors import EtcdError
from elastic3d.etcd import Endpoint, EtcdClient, MemberStatus
from elastic3d.etcd_server.binary import defects

FULL = 0.5
"""Part of its quota in use beyond which people are warned."""
DEFAULT_QUOTA = 2 << 30
ALARMS = {
    "NOSPACE": "its database is full: etcdctl compact, defrag and alarm disarm make room",
    "CORRUPT": "a member holds other data than the rest: replace it (etcdctl member remove, add), then alarm disarm",
}
"""Those under which etcd refuses all writes, and what to do about each."""


class ServerState(StrEnum):
    """What a member does."""

    LEADS = "leads"
    FOLLOWS = "follows"
    LEARNS = "learns"
    WAITS = "waits for a leader"
    AWAY = "does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A member of etcd. Sizes in bytes of its database."""

    endpoint: str
    state: ServerState
    version: str = ""
    member: str = ""
    """Its id, in hexadecimal, as etcdctl has it."""
    cluster: str = ""
    """The id of its cluster."""
    size: int = 0
    """As allocated on its disk."""
    in_use: int = 0
    """What of it holds data."""
    quota: int = 0
    """Beyond which it takes no writes, 0 where it does not say."""
    problem: str = ""
    """Why it does not answer, or what it says is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersStatus:
    """An etcd, member by member."""

    serving: bool
    """Whether it takes writes: most endpoints lead or follow, in one cluster, and no alarm forbids it."""
    members: tuple[ServerStatus, ...]
    """In the order of the endpoints."""
    warnings: tuple[str, ...]
    """What to do something about."""


def read_status(endpoints: Sequence[Endpoint], client: Callable[[Endpoint], EtcdClient]) -> ServersStatus:
    """Return the status of the members at these endpoints. client: makes one that talks to that member alone."""
    return judge(tuple(_ask(endpoint, client) for endpoint in endpoints))


def _ask(endpoint: Endpoint, client: Callable[[Endpoint], EtcdClient]) -> ServerStatus:
    try:
        with client(endpoint) as asked:
            return of_member(str(endpoint), asked.member_status())
    except EtcdError as error:
        return ServerStatus(endpoint=str(endpoint), state=ServerState.AWAY, problem=str(error))


def of_member(endpoint: str, said: MemberStatus) -> ServerStatus:
    """Return the status of a member that answered."""
    state = ServerState.FOLLOWS if said.has_leader else ServerState.WAITS
    if said.learner:
        state = ServerState.LEARNS
    elif said.leads:
        state = ServerState.LEADS
    return ServerStatus(
        endpoint=endpoint,
        state=state,
        version=said.version,
        member=f"{said.member:x}",
        cluster=f"{said.cluster:x}",
        size=said.size,
        in_use=said.in_use,
        quota=said.quota,
        problem="; ".join(said.errors),
    )


def judge(members: tuple[ServerStatus, ...]) -> ServersStatus:
    """Return the status of all, with what follows from it."""
    serving = [one for one in members if one.state in (ServerState.LEADS, ServerState.FOLLOWS)]
    quorum = len(members) // 2 + 1
    # Each member says those of all.
    alarms = [alarm for alarm in ALARMS if any(alarm in one.problem for one in serving)]
    warnings = [f"it takes no writes, by its alarm {alarm}: {ALARMS[alarm]}" for alarm in alarms]
    # Who follows has heard of its leader within a second or so, whether that one is among the endpoints or not.
    if len(serving) < quorum:
        warnings.append("it takes no writes: no majority of its members follows a leader; start those that are away")
    elif len(serving) == quorum < len(members):
        warnings.append("it serves, and would not if one more member were lost: bring back those that are away")
    if len(members) % 2 == 0:
        warnings.append(
            f"{len(members)} members stand no more losses than {len(members) - 1} would: run an odd number; or, if "
            "there are more, name all of them"
        )
    if len({one.cluster for one in members if one.cluster}) > 1:
        warnings.append("the endpoints are of different clusters: name the members of one")
    for version in sorted({one.version for one in members if one.version}):
        numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
        for defect in defects(tuple(map(int, numbers.groups()))) if numbers is not None else ():
            warnings.append(f"etcd {version} loses data: {defect.what} ({defect.source}); install a later one")
    for one in members:
        if one.in_use > FULL * (one.quota or DEFAULT_QUOTA):
            warnings.append(
                f"{one.endpoint} has used more than half of its database: compact it, and see what fills it"
            )
    return ServersStatus(
        serving=len(serving) >= quorum and not alarms and len({one.cluster for one in serving}) == 1,
        members=members,
        warnings=tuple(warnings),
    )
