"""`status`, `events`, `drain`, `quarantine` and `release` against a real etcd that holds what members write."""

from __future__ import annotations

import base64
import functools
import json
import os
import pty
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from chaos.servers.etcd import EtcdServer
from elastic3d.cli import application
from elastic3d.etcd import EtcdClient
from elastic3d.membership import actions as acts
from elastic3d.membership.records import Drain, Flap, GenerationHistory, Out, Quarantine, Tomb, decode, encode
from elastic3d.membership.transactions import transaction
from tests.cli.status import scenes
from tests.cli.status.scenes import A, B, Scene

COMMAND = [sys.executable, "-c", "from elastic3d.cli import main; main()"]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """A server that no test breaks."""
    with EtcdServer() as server:
        yield server


@dataclass(slots=True)
class Place:
    """A prefix of the test's own, and a command line for it."""

    endpoint: str
    prefix: str
    client: EtcdClient

    def put(self, scene: Scene, run_id: str = "gpt-1b", *, long: float = 600.0) -> None:
        """Write a scene's keys, those with a lease under a real one that nobody renews."""
        leases: dict[int, int] = {}
        for item in scene.items():
            if item.lease and item.lease not in leases:
                leases[item.lease] = self.client.grant(max(scene.remaining[item.lease], long))[0]
            key = self.root(run_id) + item.key.removeprefix(scenes.ROOT)
            self.client.put(key, item.value, leases.get(item.lease, 0), idempotent=True)

    def root(self, run_id: str = "gpt-1b") -> str:
        return f"/{self.prefix}/{run_id}/"

    def environment(self) -> dict[str, str]:
        return {**os.environ, "ELASTIC3D_ENDPOINT": self.endpoint, "COLUMNS": "100", "TERM": "xterm"}

    def run(self, *arguments: str, prefix: str | None = None) -> Result:
        where = ["--prefix", prefix or self.prefix]
        return CliRunner().invoke(application(), [*arguments, *where], env=self.environment())

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def nodes(self) -> dict[str, Any]:
        return {node["name"]: node for node in self.json("status")["nodes"]}

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        """Start the command as a process of its own."""
        command = [*COMMAND, *arguments, "--prefix", self.prefix]
        # A shell's background jobs ignore SIGINT, and so would their children.
        heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(command, env=self.environment(), text=True, preexec_fn=heeding, **more)


@pytest.fixture
def place(etcd: EtcdServer) -> Iterator[Place]:
    """A prefix of this test's own in a real etcd."""
    with EtcdClient(etcd.endpoint) as client:
        before = set(client.leases())
        prefix = f"test/{secrets.token_hex(4)}"
        try:
            yield Place(etcd.endpoint, prefix, client)
        finally:
            client.delete(f"/{prefix}/", prefix=True, idempotent=True)
            for lease in set(client.leases()) - before:
                client.revoke(lease)


def one_line(result: Result) -> str:
    """Return the only line of an error."""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.output
    assert result.stdout == ""
    return lines[0]


@pytest.mark.etcd
def test_status_shows_the_only_job(place: Place) -> None:
    """It needs no run id; table and JSON agree; nothing is written."""
    place.put(scenes.losses())
    _, before = place.client.range(place.root())
    table = place.run("status")
    assert table.exit_code == 0, table.output
    for words in ("gpt-1b  re-forming: b is out", "lost lease", "ECC errors (by ops@bastion)", "matrix product"):
        assert words in table.stdout
    document = place.json("status")
    assert (document["run_id"], document["state"], document["leader"], document["generation"]["number"]) == (
        *("gpt-1b", "re-forming", "a", 4),
    )
    nodes = {node["name"]: node for node in document["nodes"]}
    assert nodes["e"]["state"] == "doubted"
    # etcd's own lease gives the remaining time of a quarantine, whatever its record says.
    assert 590 <= nodes["f"]["seconds_left"] <= 600
    assert place.client.range(place.root())[1] == before


@pytest.mark.etcd
def test_the_job_is_chosen_or_has_to_be_named(place: Place) -> None:
    """None: exit 3. Several: exit 2 with their names. A running one is chosen before those that are over."""
    assert place.run("status").exit_code == 3
    assert "no job under" in one_line(place.run("status"))
    place.put(scenes.training(), "gpt-1b")
    place.put(scenes.forming(), "gpt-1b.next")
    place.put(scenes.ended(), "old")
    place.client.put(f"/{place.prefix}/stranger", b"no job", idempotent=True)
    place.client.put(f"/{place.prefix}/deeper/run/board/end", b"a job under another prefix", idempotent=True)
    several = place.run("status")
    assert several.exit_code == 2
    assert "2 jobs" in one_line(several)
    assert "gpt-1b, gpt-1b.next (and 1 that is over)" in one_line(several)
    unknown = place.run("drain", "a", "--id", "gpt-2")
    assert unknown.exit_code == 3
    assert "there is no job 'gpt-2'" in one_line(unknown)
    assert "gpt-1b, gpt-1b.next, old" in one_line(unknown)
    assert "forming" in place.run("status", "--id", "gpt-1b.next").stdout
    place.client.put(place.root("gpt-1b.next") + "board/end", scenes.encode(scenes.End(failed=False)), idempotent=True)
    assert place.json("status")["run_id"] == "gpt-1b"


@pytest.mark.etcd
def test_unreadable_keys_are_reported(place: Place) -> None:
    """A key that cannot be decoded and one that is not even text are named; the rest is shown."""
    place.put(scenes.garbage())
    place.client.put(place.root() + "board/\udcff\udc80", b"\xff", idempotent=True)
    result = place.run("status")
    assert result.exit_code == 0, result.output
    assert "Keys that cannot be read:" in result.stdout
    assert len(place.json("status")["problems"]) == 7


@pytest.mark.etcd
def test_a_drain_is_ordered_and_released(place: Place) -> None:
    """The order stands in etcd for this incarnation, status shows the time left, and release takes it back."""
    place.put(scenes.training())
    ordered = place.run("drain", "b", "--deadline", "30s", "--reason", "new kernel")
    assert ordered.exit_code == 0, ordered.output
    assert "node b leaves generation 4 at a step boundary within 30 s" in ordered.stdout
    (item,) = place.client.range(place.root() + "roll/drains/")[0]
    drain = decode(Drain, item.value, item.key)
    assert (drain.seconds, drain.reason, drain.incarnation) == (30.0, "new kernel", "1")
    assert "@" in drain.by
    node = place.nodes()["b"]
    assert node["state"] == "draining"
    assert 20 <= node["seconds_left"] <= 30
    assert "trains in no generation" in place.run("drain", "e", "--deadline", "1m").stdout
    for name in ("b", "e"):
        taken = place.run("release", name)
        assert taken.exit_code == 0
        assert f"drain of {name}" in taken.stdout
    assert place.nodes()["b"]["state"] == "active"


@pytest.mark.etcd
def test_a_drain_below_the_minimum_warns(place: Place) -> None:
    """The output says that the job will wait."""
    nodes = (A, B)
    place.put(scenes.registered(*nodes, minimum=2).write(A, scenes.sealed(scenes.generation(1, nodes))))
    assert "the job then waits for more nodes: 1 of at least 2 are left" in place.run("drain", "a").stdout


@pytest.mark.etcd
def test_a_quarantine_is_ordered_and_released(place: Place) -> None:
    """Its entry ends with a lease of its own; release removes it and forgets the losses, whoever is registered."""
    place.put(scenes.training())
    result = place.run("quarantine", "b", "--for", "10m", "--reason", "ECC errors")
    assert result.exit_code == 0, result.output
    assert "machine b is kept out for 10 min" in result.stdout
    assert "node b leaves generation 4 in a planned change" in result.stdout
    item = place.client.get(place.root() + "roll/quarantine/b")
    assert item is not None
    assert decode(Quarantine, item.value, item.key).reason == "ECC errors"
    left = place.client.time_to_live(item.lease)
    assert left is not None
    assert 590 <= left <= 600
    assert place.nodes()["b"]["state"] == "quarantined"
    place.client.put(place.root() + "roll/flaps/b", encode(Flap(id="b@0", count=2)), idempotent=True)
    place.client.delete(place.root() + "roll/members/b@1", idempotent=True)
    assert "quarantine of b, losses of b" in place.run("release", "b").stdout
    assert place.client.get(place.root() + "roll/quarantine/b") is None
    assert place.client.get(place.root() + "roll/flaps/b") is None


@pytest.mark.etcd
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("drain", "z", "--deadline", "30s"), "no node 'z' in this job; registered are a, b, c, d, e"),
        (("drain", "x", "--deadline", "30s"), "no node 'x'"),
        (("drain", "b", "--deadline", "30d"), "--deadline='30d': give seconds, or a number with ms, s, m or h"),
        (("drain", "b", "--deadline", "0s"), "--deadline='0s'"),
        (("drain", "b", "--deadline", "-5s"), "--deadline='-5s'"),
        (("drain", "b", "--deadline", "soon"), "--deadline='soon': give seconds, or a number with ms, s, m or h"),
        (("drain", "b", "--deadline", "1e3s"), "--deadline='1e3s'"),
        (("drain", "b", "--deadline", "nans"), "--deadline='nans'"),
        (("drain", "b", "--deadline", ""), "--deadline=''"),
        (("drain", "b", "--deadline", "999999h"), "ten years"),
        (("drain", "b", "--endpoint", "nonsense:port"), "'nonsense:port' is not an endpoint"),
        (("drain", "b", "--endpoint", "http://"), "is not an endpoint"),
        (("drain", "b", "--endpoint", ","), "no endpoint given"),
        (("drain", "b", "--endpoint", "ftp://e1:2379"), "is not an endpoint"),
        (("drain", "b", "--id", "a/b"), "--id 'a/b'"),
        (("drain", "b", "--prefix", "a b"), "--prefix 'a b'"),
        (("drain", "b", "--user", "root"), "--user and --password-file belong together"),
        (("drain", "b", "--user", "root", "--password-file", "/none/such"), "--password-file '/none/such'"),
        (("drain", "b", "--ca", "/none/such.pem"), "there is no file /none/such.pem"),
        (("drain", "b", "--cert", "/none/such.pem"), "--cert and --key belong together"),
        (("quarantine", "z", "--for", "10m"), "no node or machine 'z'"),
        (("quarantine", "b", "--for", "0"), "--for='0': give more than 0"),
        (("quarantine", "b", "--for", "10x"), "--for='10x'"),
        (("release", "b"), "nothing is ordered of 'b'"),
        (("release", "z"), "nothing is ordered of 'z'"),
        (("events", "--id", "\x1b[31m"), "--id"),
    ],
)
def test_bad_input_is_refused(place: Place, arguments: tuple[str, ...], words: str) -> None:
    """One clear line, exit 2, and nothing changed in etcd: no key, no lease."""
    place.put(scenes.training())
    items, revision = place.client.range(place.root())
    leases = place.client.leases()
    prefix = arguments[arguments.index("--prefix") + 1] if "--prefix" in arguments else None
    result = place.run(*arguments, prefix=prefix)
    assert result.exit_code == 2, result.output
    assert words in one_line(result)
    assert place.client.range(place.root()) == (items, revision)
    assert place.client.leases() == leases


@pytest.mark.etcd
def test_orders_to_a_job_that_is_over_are_refused(place: Place) -> None:
    """With exit 2: nobody would carry them out."""
    place.put(scenes.ended())
    for arguments in (("drain", "a"), ("quarantine", "a"), ("release", "a")):
        result = place.run(*arguments)
        assert result.exit_code == 2
        assert "is over" in one_line(result)


def test_a_missing_etcd_is_reported() -> None:
    """Exit 1 and one line: trying again may help."""
    result = CliRunner().invoke(application(), ["status", "--endpoint", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no answer from" in one_line(result)


def leads(place: Place, *writes: acts.Write) -> None:
    """Write the keys of a leader."""
    for write in writes:
        place.client.txn([], transaction(place.root(), A, write).operations, idempotent=True)


@pytest.mark.etcd
def test_drain_waits_until_the_node_has_left(place: Place) -> None:
    """`--wait` returns 0 once a generation is sealed without the node, 1 if the order is taken back."""
    place.put(scenes.training())
    five = scenes.generation(5, tuple(node for node in (A, scenes.E, scenes.C, scenes.D)), scenes.Cause.DRAIN)

    def carry_out() -> None:
        wait_for(place, "roll/drains/b")
        tomb = Tomb(incarnation="1", how=Out.LEFT, by="a")
        leads(place, scenes.sealed(five), acts.Bury(id=B.id, tomb=tomb), acts.Clear(drains=("b",), token=1))

    leader = threading.Thread(target=carry_out)
    leader.start()
    result = place.run("drain", "b", "--deadline", "20s", "--wait")
    leader.join()
    assert result.exit_code == 0, result.output
    assert re.search(r"node b left after .*; the job is in generation 5, training", result.stdout)

    def take_back() -> None:
        wait_for(place, "roll/drains/d")
        time.sleep(0.5)
        place.client.delete(place.root() + "roll/drains/d", idempotent=True)

    other = threading.Thread(target=take_back)
    other.start()
    result = place.run("drain", "d", "--deadline", "20s", "--wait")
    other.join()
    assert result.exit_code == 1
    assert "the order was taken back" in result.stderr


def wait_for(place: Place, key: str) -> None:
    deadline = time.monotonic() + 20
    while place.client.get(place.root() + key) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.etcd
def test_events_show_why_each_generation_was_formed(place: Place) -> None:
    """Newest last, and at most as many as asked for."""
    place.put(scenes.past())
    table = place.run("events")
    assert table.exit_code == 0, table.output
    assert table.stdout.index("silent to") < table.stdout.index("SIGSEGV")
    document = place.json("events", "-n", "2")
    assert [each["number"] for each in document["generations"]] == [4, 5]
    assert document["generations"][0].keys() == set(GenerationHistory.__dataclass_fields__)
    place.client.put(place.root() + "history/0000000006.0", b"garbage", idempotent=True)
    result = place.run("events")
    assert result.exit_code == 0
    assert "history/0000000006.0 holds no elastic3d record" in result.stderr


@pytest.mark.etcd
def test_events_follow_new_generations(place: Place) -> None:
    """The existing ones, then each generation once as it is sealed; Ctrl-C ends it with 0."""
    place.put(scenes.past())
    follow = place.start("events", "--follow", "-n", "2", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert follow.stdout is not None
        assert [json.loads(follow.stdout.readline())["number"] for _ in range(2)] == [4, 5]
        leads(place, scenes.sealed(scenes.generation(6, (A, B))))
        assert json.loads(follow.stdout.readline())["number"] == 6
        follow.send_signal(signal.SIGINT)
        rest, errors = follow.communicate(timeout=20)
        assert (follow.returncode, rest, errors) == (0, "", "")
    finally:
        follow.kill()
        follow.communicate()


@pytest.mark.etcd
def test_top_restores_the_terminal(place: Place, etcd: EtcdServer) -> None:
    """The page is redrawn, survives an etcd outage, and gives back screen and cursor at Ctrl-C; exit 0."""
    place.put(scenes.training())
    mine, theirs = pty.openpty()
    watch = place.start("top", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        seen = until(mine, b"", b"training")
        etcd.pause()
        try:
            seen = until(mine, seen, b"etcd does not show it now")
        finally:
            etcd.resume()
        leads(place, acts.PutEnd(end=scenes.End(failed=True, detail="enough"), token=1))
        seen = until(mine, seen, b"failed")
        watch.send_signal(signal.SIGINT)
        seen = until(mine, seen, b"\x1b[?25h")
        assert watch.wait(timeout=20) == 0
        assert b"Traceback" not in seen
        for on, off in ((b"\x1b[?25l", b"\x1b[?25h"), (b"\x1b[?1049h", b"\x1b[?1049l")):
            assert seen.rfind(off) > seen.rfind(on)
    finally:
        watch.kill()
        watch.wait()
        os.close(mine)


def until(terminal: int, seen: bytes, words: bytes) -> bytes:
    """Read from a terminal until the text appears."""
    deadline = time.monotonic() + 30
    start = len(seen)
    while words not in seen[start:]:
        assert time.monotonic() < deadline, seen.decode(errors="replace")
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
    return seen


@pytest.mark.etcd
def test_status_takes_certificates_and_a_password(tmp_path: Path) -> None:
    """From its options; without them the error says what is missing."""
    with EtcdServer(tls=True, password="secret") as server:
        assert server.certificates is not None
        ca = server.certificates.ca
        (tmp_path / "password").write_text("secret\n")
        let_in = ["--user", "root", "--password-file", str(tmp_path / "password"), "--ca", str(ca)]
        with EtcdClient(server.endpoint, user="root", password="secret", tls=server.certificates.tls()) as client:
            Place(server.endpoint, "elastic3d", client).put(scenes.training())
        run = ["status", "--endpoint", server.endpoint]
        assert "gpt-1b  training" in CliRunner().invoke(application(), [*run, *let_in]).stdout
        refused = CliRunner().invoke(application(), [*run, "--ca", str(ca)])
        assert refused.exit_code == 1
        assert "user" in one_line(refused)


@pytest.mark.etcd
def test_a_user_with_rights_on_one_job_can_see_that_job(tmp_path: Path) -> None:
    """By its name; other jobs cannot be listed, and the output does not claim that there are none."""
    with EtcdServer() as server:
        with EtcdClient(server.endpoint) as client:
            Place(server.endpoint, "jobs", client).put(scenes.training())
        ask = server.members[0].ask
        for name in ("root", "job"):
            ask("/v3/auth/user/add", {"name": name, "password": "secret"})
            ask("/v3/auth/role/add", {"name": name})
            ask("/v3/auth/user/grant", {"user": name, "role": name})
        for name in ("gpt-1b", "gone"):
            key, end = (base64.b64encode(f"/jobs/{name}{last}".encode()).decode() for last in "/0")
            ask("/v3/auth/role/grant", {"name": "job", "perm": {"permType": 2, "key": key, "range_end": end}})
        ask("/v3/auth/enable", {})
        (tmp_path / "password").write_text("secret")
        let_in = ["--endpoint", server.endpoint, "--user", "job", "--password-file", str(tmp_path / "password")]
        run = ["status", *let_in, "--prefix", "jobs"]
        assert "gpt-1b  training" in CliRunner().invoke(application(), [*run, "--id", "gpt-1b"]).stdout
        gone = CliRunner().invoke(application(), [*run, "--id", "gone"])
        assert gone.exit_code == 3
        assert "may not read" in one_line(gone)
        refused = CliRunner().invoke(application(), run)
        assert refused.exit_code == 1
        assert "permission denied" in one_line(refused)


@pytest.mark.parametrize("command", ["status", "events", "drain", "quarantine", "release"])
def test_help_has_examples(command: str) -> None:
    """Each command shows how to call it, and how to name the job."""
    result = CliRunner().invoke(application(), [command, "--help"], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert f"elastic3d {command} " in result.stdout
    assert "ELASTIC3D_ENDPOINT" in result.stdout


def test_status_does_not_import_torch() -> None:
    """torch takes seconds to import; a person with a failing job should not wait for it."""
    code = (
        "import sys, elastic3d.cli\n"
        "sys.argv = ['elastic3d', 'status', '--help']\n"
        "try: elastic3d.cli.main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.splitlines()[-1] == "False"
