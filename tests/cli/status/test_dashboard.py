"""`elastic3d dashboard` as people start it: a process of its own, about a job in a real etcd, asked over HTTP."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.servers.etcd import EtcdServer
from elastic3d.cli import application
from elastic3d.etcd import EtcdClient
from elastic3d.log import EventLog
from elastic3d.membership.records import MemberRecord, encode
from tests.cli.ckpt import scenes as checkpoints
from tests.cli.status import scenes
from tests.cli.status.test_live import Job
from tests.cli.status.test_node_commands import COMMAND
from tests.dashboard.serving import Stream, ask
from tests.pages.parsed import HOSTILE

LIVE = pytest.mark.etcd


@dataclass(slots=True)
class Shown:
    """A dashboard that serves. address: what it printed."""

    process: subprocess.Popen[str]
    address: str

    @property
    def port(self) -> int:
        return int(self.address.split(":")[2].partition("/")[0])

    @property
    def bearer(self) -> str:
        return f"Bearer {self.address.partition('?token=')[2]}"

    def stream(self) -> Stream:
        return Stream(self.port, authorization=self.bearer)

    def order(self, **wish: str) -> tuple[int, str]:
        headers = {
            "authorization": self.bearer,
            "origin": f"http://127.0.0.1:{self.port}",
            "content-type": "application/json",
        }
        response, body = ask(self.port, "POST", "/orders", headers, json.dumps(wish).encode())
        return response.status, body.decode()

    def interrupt(self) -> tuple[int, float]:
        """Press Ctrl-C; return the exit code, and how long it took."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20), time.monotonic() - begun


@contextmanager
def dashboard(*arguments: str) -> Iterator[Shown]:
    """Start the command and wait until it serves."""
    # A shell's background jobs ignore SIGINT, and so would their children.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [*COMMAND, "dashboard", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeding, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match is not None, (line, process.stderr.read() if process.stderr is not None else "")
        yield Shown(process, match[0])
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def job() -> Iterator[Job]:
    """A job of four nodes, of which three may train, that has formed."""
    with EtcdServer() as server:
        job = Job(server.endpoint)
        try:
            job.until(1, lambda shown, states: len(states) == 4 and len(shown["generation"]["nodes"]) == 3)
            yield job
        finally:
            for one in job.all.values():
                one.close()


@LIVE
def test_a_node_is_drained_from_the_page_and_all_browsers_see_it(job: Job) -> None:
    """The order goes through etcd to the leader; the next generation comes over the stream, and its cause with it."""
    before = job.status()
    leaving = before["generation"]["nodes"][1]
    with dashboard(*job.arguments, "--allow-orders") as shown:
        streams = [shown.stream() for _ in range(2)]
        for stream in streams:
            assert stream.next()[0] == "whole"
            assert [key.partition("@")[0] for key in stream.state["nodes"]["order"]] == [
                *before["generation"]["nodes"],
                *({"a", "b", "c", "d"} - {*before["generation"]["nodes"]}),
            ]
        status, said = shown.order(order="drain", node=leaving, reason="new kernel", **{"for": "30s"})
        assert (status, said) == (200, f"node {leaving} leaves within 30 s\n")
        for stream in streams:
            state = stream.until(lambda state: f" -{leaving}</td>" in state["parts"]["generations"])
            assert '<span class="cause">drain</span>' in state["parts"]["generations"]
            state = stream.until(lambda state: leaving not in [key[0] for key in state["nodes"]["order"]])
            assert '<h1>gpt-1b</h1><span class="state ok">training</span>' in state["parts"]["job"]
        assert shown.order(order="drain", node=leaving)[0] == 400
        assert shown.order(order="dance", node="a") == (
            400,
            "'dance' is no order: give drain, quarantine or release\n",
        )
        assert shown.order(order="quarantine", node="a", **{"for": "soon"})[0] == 400
        # Ctrl-C, with both streams open.
        code, took = shown.interrupt()
        assert (code, took < 5.0) == (0, True), took
        for stream in streams:
            with pytest.raises(EOFError):
                stream.until(lambda state: False)
            stream.close()


@LIVE
@pytest.mark.long
def test_a_page_that_only_shows_survives_its_etcd(tmp_path: Path) -> None:
    """Whatever names stand in etcd; with the losses of the event files; and while etcd is away it says so."""
    strange = replace(scenes.B, name="<script>x", incarnation="<img src=x>")
    scene = scenes.training()
    scene.put(f"roll/members/{strange.id}", encode(MemberRecord(node=strange)))
    with EtcdServer() as server, EtcdClient(server.endpoint) as client:
        for item in scene.items():
            client.put(item.key, item.value, idempotent=True)
        with EventLog(tmp_path / "a-0.jsonl", run="gpt-1b", node="a") as log:
            log.emit("step.committed", step=1, loss=(3.25).hex(), seconds=0.5, generation=4)
            log.emit("checkpoint.failed", step=1, error=HOSTILE, age=1.0)
            log.flush(5.0)
            with dashboard("--endpoint", server.endpoint, "--events", str(tmp_path)) as shown:
                response, body = ask(shown.port, "GET", "/", {})
                assert (response.status, b"gpt-1b" in body) == (401, False)
                token = shown.address.partition("/?")[2]
                response, _ = ask(shown.port, "GET", f"/?{token}", {})
                cookie = response.headers["set-cookie"].partition(";")[0]
                _, body = ask(shown.port, "GET", "/", {"cookie": cookie})
                text = body.decode()
                assert text.count("<script") == 1
                assert "<img" not in text
                assert "&lt;script&gt;x" in text
                assert "--events FOLDER shows them" not in text
                assert shown.order(order="drain", node="a") == (
                    403,
                    "This page only shows the job; elastic3d dashboard --allow-orders lets it give orders.\n",
                )
                stream = shown.stream()
                stream.next()
                assert stream.state["series"]["0"] == [[1, 3.25, 0.5, 4]]
                assert "alert(1)" in stream.state["parts"]["events"]
                server.pause()
                try:
                    log.emit("step.committed", step=2, loss=(3.0).hex(), seconds=0.5, generation=4)
                    state = stream.until(lambda state: bool(state["away"]))
                    assert "training" in state["parts"]["job"]
                finally:
                    server.resume()
                state = stream.until(lambda state: not state["away"])
                assert [point[0] for point in state["series"]["0"]] == [1, 2]
                stream.close()
                assert shown.interrupt()[0] == 0
                assert shown.process.stderr is not None
                assert shown.process.stderr.read() == ""


@LIVE
def test_the_page_lists_the_jobs_store_and_compares_two_of_its_checkpoints(tmp_path: Path) -> None:
    """Also one that is committed while the page is open; a store that is not there is said, and then found."""
    with EtcdServer() as server, EtcdClient(server.endpoint) as client:
        for item in scenes.training().items():
            client.put(item.key, item.value, idempotent=True)
        place = tmp_path / "run"
        with dashboard("--endpoint", server.endpoint, "--store", str(place)) as shown:
            stream = shown.stream()
            state = stream.until(lambda state: "cannot be read" in state["parts"]["store_state"])
            assert "Not read yet" in state["parts"]["store"]
            _, written = checkpoints.run(place)
            state = stream.until(lambda state: written[-1] in state["parts"]["store_after"], most=200)
            assert "none: it stands for itself" in state["parts"]["store"]
            about = f"/difference?before={written[0]}&after={written[-1]}"
            response, body = ask(shown.port, "GET", about, {"authorization": shown.bearer})
            assert (response.status, b"blocks.{0..3}" in body) == (200, True)
            response, _ = ask(shown.port, "GET", about, {})
            assert response.status == 401
            stream.close()
            code, took = shown.interrupt()
            assert (code, took < 5.0) == (0, True), took


@LIVE
def test_it_says_what_is_wrong_before_it_serves(tmp_path: Path) -> None:
    """A port that is taken, a folder that is not there, orders without a token, no such job; with the usual codes."""
    with EtcdServer() as server, socket.create_server(("127.0.0.1", 0)) as taken:
        with EtcdClient(server.endpoint) as client:
            for item in scenes.training().items():
                client.put(item.key, item.value, idempotent=True)
        port = taken.getsockname()[1]
        for arguments, code, words in (
            (["--listen", f"127.0.0.1:{port}"], 2, "in use; give another host, or another port"),
            (["--listen", "192.0.2.1:0"], 2, "give another host, or another port"),
            (["--listen", "8080"], 2, "give HOST:PORT"),
            (["--events", str(tmp_path / "none")], 2, "there is no such folder"),
            (["--allow-orders", "--open-without-token"], 2, "needs the token"),
            (["--allow-host", "a:1"], 2, "without a port"),
            (["--store", "s3:bucket"], 2, "a URL has '://' after its scheme"),
            (["--store", str(tmp_path), "--key-file", str(tmp_path / "none")], 2, "--store: "),
            (["--id", "other"], 3, "there is no job 'other'"),
        ):
            result = CliRunner().invoke(application(), ["dashboard", "--endpoint", server.endpoint, *arguments])
            assert (result.exit_code, len(result.stderr.splitlines())) == (code, 1), result.output
            assert words in result.stderr
        with dashboard("--endpoint", server.endpoint, "--listen", "0.0.0.0:0", "--open-without-token") as shown:
            response, _ = ask(shown.port, "GET", "/", {})
            assert response.status == 200
            assert "token" not in shown.address
            shown.interrupt()
            assert shown.process.stderr is not None
            assert "whoever reaches this port sees the job" in shown.process.stderr.read()


def test_without_its_extra_it_names_what_to_install() -> None:
    """Nothing else of the command line needs it."""
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "from elastic3d.cli import main\n"
        "sys.argv = ['elastic3d', 'dashboard', '--endpoint', '127.0.0.1:1']\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "pip install 'elastic3d[dashboard]'" in result.stderr
