"""A starting node waits for its etcd as long as it would wait for other nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from chaos.servers.etcd import EtcdServer
from elastic3d import output
from elastic3d.errors import EtcdUnavailable, JobEnded
from elastic3d.etcd import PasswordRefused
from elastic3d.membership.policy import Policy
from elastic3d.rendezvous.connect import connect
from elastic3d.rendezvous.errors import RendezvousEnded
from elastic3d.rendezvous.resident import ResidentHandler
from elastic3d.rendezvous.settings import Settings

pytestmark = pytest.mark.etcd


def settings(endpoint: str, below_minimum: float = 600.0) -> Settings:
    return Settings(
        endpoints=endpoint,
        run_id="early",
        mode="restart",
        node="me",
        address="127.0.0.1",
        policy=Policy(minimum=1, maximum=4, below_minimum=below_minimum),
    )


def test_an_etcd_that_answers_late_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than the budget of a call, as when a thousand nodes start at once; it says that it is waiting."""
    with EtcdServer() as server:
        server.pause()
        late = threading.Timer(7.0, server.resume)
        late.start()
        try:
            began = time.monotonic()
            connect(settings(server.endpoint)).close()
            assert 6.0 < time.monotonic() - began < 15.0
        finally:
            late.join()
    assert "trying for 30 s more" in capsys.readouterr().err


def test_an_etcd_that_never_answers_is_an_error(
    capsys: pytest.CaptureFixture[str], refusing_port: Callable[[], int]
) -> None:
    """After as long as the job waits for other nodes, or at once on request."""
    agreed = settings(f"127.0.0.1:{refusing_port()}", below_minimum=2.0)
    began = time.monotonic()
    with pytest.raises(EtcdUnavailable, match="see that etcd runs"):
        connect(agreed)
    assert 5.0 < time.monotonic() - began < 12.0
    assert "trying for 2 s more" in capsys.readouterr().err
    with pytest.raises(EtcdUnavailable):
        connect(agreed, patience=0.0)
    assert "more" not in capsys.readouterr().err


def test_a_password_that_is_being_changed_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd has the new one, and the file that the node reads it from has it a moment later; not for ever."""
    file = tmp_path / "password"
    file.write_text("new")
    with EtcdServer(password="old") as server:
        agreed = replace(settings(server.endpoint, below_minimum=2.0), user="root", password_file=str(file))
        with monkeypatch.context() as waits:
            say = output.say

            def said(text: str) -> None:
                say(text)
                file.write_text("old")

            waits.setattr(output, "say", said)
            connect(agreed).close()
        assert "wrong user name or password; trying for 2 s more" in capsys.readouterr().err
        file.write_text("other")
        with pytest.raises(PasswordRefused):
            connect(agreed)
        with pytest.raises(PasswordRefused):
            connect(agreed, patience=0.0)
        assert capsys.readouterr().err.count("trying for") == 1


def test_errors_of_a_handler_are_torchs_rendezvous_errors(refusing_port: Callable[[], int]) -> None:
    """Whether a caller catches torch's classes or ours; the text is the same."""
    agreed = settings(f"127.0.0.1:{refusing_port()}", below_minimum=1.0)
    for kind in (RendezvousConnectionError, EtcdUnavailable):
        with pytest.raises(kind, match="see that etcd runs"):
            ResidentHandler(agreed, "etcd").next_rendezvous()
    assert issubclass(RendezvousEnded, RendezvousClosedError)
    assert issubclass(RendezvousEnded, JobEnded)
