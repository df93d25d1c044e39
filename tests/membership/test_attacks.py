"""Outsiders write to the job's keys: the job goes on, and whoever cannot take part is told why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from chaos.servers import etcd_attacks
from chaos.servers.etcd import EtcdCluster
from elastic3d.membership import events as e
from elastic3d.membership.records import SCHEMA, decode, encode
from elastic3d.trust.agreement import What
from elastic3d.values import Generation
from tests.membership.crew import POLICY, PROFILE, Crew, in_training, wait

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(240), pytest.mark.long]

PATIENCE = POLICY.lease + POLICY.grace

PULSE = 6.0
"""Seconds within which a member checks its own keys."""

GARBAGE = (b"", b"\xff\x00 garbage", b"{}", b"[]", b'{"schema":"x"}', b'{"schema":1,"node":3}')


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    """Three members of etcd with TLS and a password, which no test breaks."""
    with EtcdCluster(3, password="secret", tls=True) as cluster:
        yield cluster


@pytest.fixture
def crew(cluster: EtcdCluster) -> Iterator[Crew]:
    """Three members that train."""
    with in_training(cluster.client) as crew:
        yield crew


@pytest.fixture
def patient(cluster: EtcdCluster) -> Iterator[Crew]:
    """Three training members that give each other time to notice overwritten keys."""
    with in_training(cluster.client, replace(POLICY, orphan=2 * PULSE)) as crew:
        yield crew


def test_members_survive_leases_revoked_by_hand(crew: Crew) -> None:
    """One after another, the leader's too: each member registers again, one leads, and nobody is evicted."""
    for name in "abc":
        etcd_attacks.revoke(crew.client, f"{crew.root}roll/members/{crew.all[name].id}")
        crew.goes_on("abc", 1, 1.0)
        crew.all_registered("abc", 5)
    crew.goes_on("abc", 1, PATIENCE + 0.5)
    assert crew.registered() == "abc*"


def test_a_job_survives_the_deletion_of_all_keys(patient: Crew) -> None:
    """Members write their keys again, and the leader the generation, which it knows."""
    crew = patient
    before = crew.records()["board/generation"]
    crew.client.delete(crew.root, prefix=True)
    crew.all_registered("abc", PULSE)
    wait(lambda: crew.records().get("board/generation") == before, 5)
    crew.goes_on("abc", 1, PATIENCE)
    crew.all.pop("b").die()
    crew.trains("ac", 2, 5)


@pytest.mark.parametrize("stands", [None, b"hunter2", b"a1" * 32])
def test_a_job_survives_a_deleted_garbled_or_replaced_secret(crew: Crew, stands: bytes | None) -> None:
    """Running members notice nothing: the leader writes it again once, or all adopt the other; a newcomer joins."""
    key, before = crew.root + "board/secret", crew.all["a"].secret
    if stands is None:
        crew.client.delete(key)
    else:
        crew.client.put(key, stands)
    replaced = stands is not None and len(stands) == 64
    wanted = b"a1" * 32 if replaced else before.encode()
    wait(lambda: crew.records().get("board/secret") == wanted, 20)
    wait(lambda: {one.secret.encode() for one in crew.all.values()} == {wanted}, 20)
    crew.start("d")
    crew.trains("abcd", 2, 20)
    adopted = [(news.what, news.was) for one in crew.all.values() for news in one.trusted]
    was = "missing" if stands is None else "garbage"
    assert adopted == ([(What.ADOPTED, "")] * 3 if replaced else [(What.RESTORED, was)])
    crew.goes_on("abcd", 2, PATIENCE)


def test_a_newcomer_may_be_first_in_an_emptied_etcd(patient: Crew) -> None:
    """It writes a secret of its own before the running members are back: they adopt it, and nobody is evicted."""
    crew = patient
    crew.client.delete(crew.root, prefix=True)
    crew.client.put(crew.root + "board/secret", b"a1" * 32)
    crew.start("d")
    wait(lambda: len({one.secret for one in crew.all.values()}) == 1, 20)
    wait(lambda: crew.registered() == "abcd*", 30)
    assert crew.records()["board/secret"].decode() == crew.all["d"].secret
    wait(lambda: {names for _number, names in crew.worlds()} == {"abcd"}, 30, lambda: str(crew.worlds()))


def test_a_second_job_under_the_same_id_is_refused(crew: Crew) -> None:
    """Its nodes are told what to do and end; the first job does not notice."""
    crew.start("x", "y", profile=replace(PROFILE, digest="another"))
    strangers = [crew.all.pop(name) for name in "xy"]
    wait(lambda: all(one.exit is not None for one in strangers), 10)
    for one in strangers:
        one.close()
        assert one.exit is not None
        assert one.exit.failed
        assert not one.exit.rejoin
        assert "choose another --rdzv-id" in one.exit.detail
    crew.goes_on("abc", 1, 1.0)
    assert crew.registered() == "abc*"


NEWER = """
import sys
from pathlib import Path
from elastic3d.membership import records
records.SCHEMA += 1
from elastic3d.etcd import EtcdClient, Tls
from tests.membership import crew
endpoints, ca, root = sys.argv[1:]
connect = lambda: EtcdClient(endpoints, user="root", password="secret", tls=Tls(ca=Path(ca)))
one = crew.Hand(connect, root, "newer", crew.POLICY, crew.PROFILE)
crew.wait(lambda: one.exit is not None, 20)
one.close()
print(one.exit.failed, one.exit.rejoin, one.exit.detail)
"""


def test_a_member_with_a_newer_schema_is_refused(crew: Crew, cluster: EtcdCluster) -> None:
    """A real process that writes records of the next schema is told that an upgrade is needed; the others go on."""
    assert cluster.certificates is not None
    command = [sys.executable, "-c", NEWER, cluster.endpoint, str(cluster.certificates.ca), crew.root]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.startswith("True False "), ran.stderr
    assert "upgrade the job's nodes" in ran.stdout
    crew.goes_on("abc", 1, 1.0)
    wait(lambda: crew.registered() == "abc*", 5)


def test_a_generation_of_a_newer_schema_is_not_touched(crew: Crew) -> None:
    """Members must be able to read what they obey: all go, with the reason, and overwrite nothing."""
    current = json.loads(crew.records()["board/generation"])
    newer = json.dumps({**current, "schema": SCHEMA + 1}).encode()
    crew.client.put(crew.root + "board/generation", newer)
    wait(lambda: all(one.exit is not None for one in crew.all.values()), 5)
    for one in crew.all.values():
        assert one.exit is not None
        assert one.exit.failed
        assert "upgrade this node" in one.exit.detail
        one.close()
    assert crew.records()["board/generation"] == newer


def test_garbage_in_any_key_changes_no_generation(crew: Crew) -> None:
    """Of every kind, one after another: it is overwritten, swept, or ignored."""
    a, b = crew.all["a"], crew.all["b"]
    before = crew.records()["board/generation"]
    for garbage in GARBAGE:
        crew.client.put(crew.root + "board/leader", garbage)
        wait(lambda: crew.records()["board/leader"].startswith(b'{"schema":%d,"name"' % SCHEMA), 5)
        crew.client.put(crew.root + "board/generation", garbage)
        wait(lambda: crew.records()["board/generation"] == before, 5)
        swept = (
            "board/end",
            *(f"board/{kind}/{id}" for kind in ("tombs", "doubts") for id in (a.id, b.id, "nobody@1", "", "x/y")),
            *(f"roll/{kind}/{name}" for kind in ("drains", "quarantine", "flaps") for name in ("a", "", "x/y")),
        )
        for key in swept:
            crew.client.put(crew.root + key, garbage)
        wait(lambda swept=swept: not crew.records().keys() & set(swept), 10, lambda: str(sorted(crew.records())))
    others = ("board/proposal", "board/what", "roll/reports/nobody@1", "history/x", "refused/x", "pulses/x", "", "what")
    for key in others:
        crew.client.put(crew.root + key, GARBAGE[1])
    crew.goes_on("abc", 1, 1.0)
    crew.all_registered("abc", 5)
    crew.start("d")
    crew.trains("abcd", 2, 10)
    assert all(not one.troubles() for one in crew.all.values())


def test_garbage_in_members_own_keys_is_overwritten(patient: Crew) -> None:
    """Its owner writes the key again and is not evicted for somebody else's write; keys of strangers are swept."""
    crew = patient
    for number, garbage in enumerate(GARBAGE[1:4]):
        for one in crew.all.values():
            for kind in ("members", "reports"):
                crew.client.put(f"{crew.root}roll/{kind}/{one.id}", garbage)
        stranger = f"roll/members/nobody@{number}"
        crew.client.put(crew.root + stranger, garbage)
        own = {f"roll/{kind}/{one.id}" for one in crew.all.values() for kind in ("members", "reports")}

        def healed(own: set[str] = own, stranger: str = stranger) -> bool:
            records = crew.records()
            return all(len(records.get(key, b"")) > 30 for key in own) and stranger not in records

        wait(healed, PULSE + 2, lambda: str(crew.records()))
        crew.goes_on("abc", 1, 0.5)
    crew.goes_on("abc", 1, PATIENCE)
    crew.all.pop("b").die()
    crew.trains("ac", 2, 5)


def test_a_job_begins_despite_existing_garbage(cluster: EtcdCluster) -> None:
    """A job that begins on garbage begins all the same."""
    crew = Crew(cluster.client)
    try:
        for key in ("leader", "generation", "proposal", "tombs/a@1", "doubts/a@1"):
            crew.client.put(f"{crew.root}board/{key}", b"garbage")
        crew.start("a", "b")
        wait(lambda: any(len(names) == 2 for _number, names in crew.worlds()), 10, lambda: str(crew.records()))
        sealed = decode(Generation, crew.records()["board/generation"], "board/generation")
        assert encode(sealed) == crew.records()["board/generation"]
    finally:
        crew.close()


def test_a_compaction_does_not_disturb_current_watches(crew: Crew, cluster: EtcdCluster) -> None:
    """Watches that are up to date do not notice it."""
    etcd_attacks.compact(cluster)
    crew.all.pop("c").die()
    crew.trains("ab", 2, 5)
    listed = [event for one in crew.all.values() for event in one.noted if isinstance(event, e.Listed)]
    assert not any(event.gap for event in listed)
