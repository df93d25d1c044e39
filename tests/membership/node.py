"""A member as a process of its own, whose trainers obey at once.

    python -m tests.membership.node ENDPOINT ROOT NAME ADDRESS MAXIMUM SILENCE

Each line on stdout is a JSON object with `at`, monotonic seconds that all processes of one machine share, and what
happened: `go` (number, cause and names of a generation that runs here), `stop`, `exit` (rejoin, detail), `joined`
(incarnation). When the others evict it, it rejoins as a newcomer. Ends with stdin.
"""

from __future__ import annotations

import json
import queue
import secrets
import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

from elastic3d.clock import SYSTEM
from elastic3d.etcd import EtcdClient
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver.links import Links
from elastic3d.membership.driver.member import Member
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import MemberRecord, Pulse
from elastic3d.planner import Plan, plan
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Layout, ModelProfile, Node, Slot

PROFILE = ModelProfile(blocks=64, parameters=1, micro_batches=64, micro_batch=1, digest="job")


def say(**what: object) -> None:
    print(json.dumps({"at": SYSTEM.monotonic(), **what}), flush=True)


def planner(
    nodes: int,
    record: MemberRecord,
    present: Layout | None,
    speeds: Sequence[float] = (),
    bound: MemoryBound | None = None,
    counts: Collection[int] | None = None,
) -> Plan:
    return plan(nodes, len(record.node.slots), PROFILE, Layout(), previous=present, speeds=speeds, counts=counts)


def main(endpoint: str, root: str, name: str, address: str, maximum: str, silence: str) -> None:
    inbox: queue.SimpleQueue[acts.Local | None] = queue.SimpleQueue()
    client = EtcdClient(endpoint)
    links = Links(address, lambda event: member.tell(event), secret="5e" * 32, silence=float(silence))
    policy = Policy(minimum=1, maximum=int(maximum), first_gather=3.0, reach_again=2.0)
    record = MemberRecord(
        node=Node(
            name=name,
            incarnation="",
            address=address,
            slots=(Slot(tile_port=1),),
            heartbeat_port=links.port,
        ),
        profile=PROFILE,
    )

    def join(*, again: bool) -> Member:
        node = replace(record.node, incarnation=secrets.token_hex(4))
        mine = replace(record, node=node)
        joined = Member(
            client, root, mine, policy, planner, inbox.put, pulse=lambda: Pulse(state="active", generation=0, every=0)
        )
        nonlocal member
        member = joined
        joined.start(links, again=again)
        say(joined=node.incarnation)
        return joined

    def until_told() -> None:
        sys.stdin.read()
        inbox.put(None)

    threading.Thread(target=until_told, daemon=True).start()
    member: Member
    member = join(again=False)
    while (action := inbox.get()) is not None:
        match action:
            case acts.Prepare():
                member.tell(e.TrainersPrepared(key=action.generation.key))
            case acts.StartTrainers():
                formed = action.generation
                names = [node.name for node in formed.nodes]
                say(go=formed.number, cause=str(formed.cause), names=names, detail=formed.detail)
            case acts.AskLeave():
                member.tell(e.Left(key=action.key, step=5))
            case acts.Stop():
                say(stop=action.key)
            case acts.Exit():
                say(exit=action.detail, rejoin=action.rejoin)
                member.close()
                if not action.rejoin:
                    return
                member = join(again=True)
            case _:
                pass
    member.tell(e.LeaveAsked())
    member.settle()
    member.close()
    links.close()
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
