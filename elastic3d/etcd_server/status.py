"""What every member of an etcd says of itself, and what follows from all of it.

Which members there are says the etcd: one endpoint is enough, and those of a member count once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic3d.errors import ConfigurationError, EtcdError
from elastic3d.etcd import Endpoint, EtcdClient, ListedMember, MemberStatus, parse_endpoints
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
    """Whether it takes writes: members lead or follow, in one cluster, and no alarm forbids it."""
    members: tuple[ServerStatus, ...]
    """Each once: those at the endpoints, in their order, then the others that it lists."""
    warnings: tuple[str, ...]
    """What to do something about."""


def read_status(endpoints: Sequence[Endpoint], client: Callable[[Endpoint], EtcdClient]) -> ServersStatus:
    """Return the status of all members of the etcd at these endpoints. client: makes one that talks to one alone."""
    seen: dict[str, ServerStatus] = {}
    listed: tuple[ListedMember, ...] = ()
    for endpoint in endpoints:
        one = _ask(endpoint, client)
        seen.setdefault(one.member or one.endpoint, one)
        if one.state is not ServerState.AWAY:
            listed = listed or _listed(endpoint, client)
    for member in listed:
        id, addresses = f"{member.member:x}", _addresses(member)
        if id in seen:
            continue
        in_vain = [str(address) for address in addresses if str(address) in seen]
        if in_vain:
            seen[in_vain[0]] = replace(seen[in_vain[0]], member=id)
        else:
            seen[id] = _ask_listed(id, member.name, addresses, client)
    return judge(tuple(seen.values()), sum(not member.learner for member in listed))


def _ask(endpoint: Endpoint, client: Callable[[Endpoint], EtcdClient]) -> ServerStatus:
    try:
        with client(endpoint) as asked:
            return of_member(str(endpoint), asked.member_status())
    except EtcdError as error:
        return ServerStatus(endpoint=str(endpoint), state=ServerState.AWAY, problem=str(error))


def _listed(endpoint: Endpoint, client: Callable[[Endpoint], EtcdClient]) -> tuple[ListedMember, ...]:
    """Return the members that one lists, () where it does not."""
    try:
        with client(endpoint) as asked:
            return asked.members()
    except EtcdError:
        return ()


def _addresses(member: ListedMember) -> tuple[Endpoint, ...]:
    """Return where a member says that clients reach it, () for what is no address."""
    try:
        return parse_endpoints(member.addresses)
    except ConfigurationError:
        return ()


def _ask_listed(
    id: str, name: str, addresses: Sequence[Endpoint], client: Callable[[Endpoint], EtcdClient]
) -> ServerStatus:
    """Return the status of a member that no endpoint is of."""
    away = ServerStatus(endpoint=name, state=ServerState.AWAY, member=id)
    if not addresses:
        return replace(away, problem="it gives out no address for clients, as before its first start")
    try:
        one = _ask(addresses[0], client)
    except ConfigurationError as error:
        return replace(away, endpoint=str(addresses[0]), problem=str(error))
    if one.member not in ("", id):
        return replace(away, endpoint=one.endpoint, problem="another one answers at the address that it gives out")
    return replace(one, member=id)


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


def judge(members: tuple[ServerStatus, ...], voters: int) -> ServersStatus:
    """Return the status of all, with what follows from it. voters: how many have a vote, 0 where none lists them."""
    serving = [one for one in members if one.state in (ServerState.LEADS, ServerState.FOLLOWS)]
    unlisted = not voters
    voters = voters or len(members)
    quorum = voters // 2 + 1
    # Each member says those of all.
    alarms = [alarm for alarm in ALARMS if any(alarm in one.problem for one in serving)]
    warnings = [f"it takes no writes, by its alarm {alarm}: {ALARMS[alarm]}" for alarm in alarms]
    # A leader that does not hear most members, and a follower that does not hear it, is none after a second or so: one
    # that answers vouches for those that cannot be reached from here.
    if not serving:
        warnings.append("it takes no writes: no majority of its members follows a leader; start those that are away")
    elif len(serving) < quorum:
        warnings.append(
            f"it serves, though only {len(serving)} of its {voters} members answer here: see whether the others run, "
            "and what addresses they give out"
        )
    elif len(serving) == quorum < voters:
        warnings.append("it serves, and would not if one more member were lost: bring back those that are away")
    if serving and unlisted:
        warnings.append("it does not say which members it has: log in as a user who may ask, or name all of them")
    if voters % 2 == 0:
        warnings.append(f"{voters} members stand no more losses than {voters - 1} would: run an odd number")
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
        serving=not alarms and len({one.cluster for one in serving}) == 1,
        members=members,
        warnings=tuple(warnings),
    )
