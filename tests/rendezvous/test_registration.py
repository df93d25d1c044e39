"""How the backend name `etcd` becomes ours in torch's registry."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from elastic3d.errors import ConfigurationError
from elastic3d.rendezvous import registration
from elastic3d.rendezvous.resident import ResidentHandler
from elastic3d.rendezvous.restart import RestartHandler


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Torch's registry, put back afterwards."""
    monkeypatch.setattr(rendezvous_handler_registry, "_registry", dict(rendezvous_handler_registry._registry))
    return rendezvous_handler_registry._registry


def ask(backend: str, **conf: str) -> Any:
    """Return the handler torchrun would get."""
    return get_rendezvous_handler(
        RendezvousParameters(
            backend=backend, endpoint="127.0.0.1:1", run_id="job", min_nodes=1, max_nodes=2, local_addr=None, **conf
        )
    )


def test_the_installed_entry_point_takes_over(registry: dict[str, Any]) -> None:
    """Importing torch's rendezvous package is enough: both names are ours before anybody calls us."""
    assert registry["etcd"] is registration.create
    assert registry["etcd-v3"] is registration.create


@pytest.mark.parametrize("backend", ["etcd", "etcd-v3"])
@pytest.mark.parametrize(("mode", "kind"), [("restart", RestartHandler), ("resident", ResidentHandler)])
def test_the_mode_selects_the_handler(backend: str, mode: str, kind: type) -> None:
    """torchrun gets it under the name it asked for; making one starts nothing."""
    handler = ask(backend, mode=mode)
    assert isinstance(handler, kind)
    assert handler.get_backend() == backend
    assert handler.get_run_id() == "job"
    assert handler.use_agent_store is False
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown() is True


def test_wrong_settings_are_reported_through_torch() -> None:
    """A mistake on the command line reaches the user as our error."""
    with pytest.raises(ConfigurationError, match="mode=fast"):
        ask("etcd", mode="fast")


def test_the_takeover_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, registry: dict[str, Any]) -> None:
    """With the switch at 0 the name `etcd` keeps its former handler."""
    monkeypatch.setenv(registration.SWITCH, "0")
    registry["etcd"] = "torch's own"
    assert registration.register() is registration.create
    assert registry["etcd"] == "torch's own"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rdzv-backend=etcd", "train.py"],
        ["--rdzv_backend=etcd", "train.py"],
        ["--rdzv-backend", "etcd", "train.py"],
        ["--rdzv_backend", "etcd", "train.py"],
    ],
)
def test_a_failed_takeover_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """If torch's registry has changed, a torchrun that asks for etcd ends and says what to do."""
    import torch.distributed.elastic.rendezvous.api as api

    monkeypatch.setattr(api, "rendezvous_handler_registry", object())
    monkeypatch.setattr(sys, "argv", ["torchrun", *arguments])
    with pytest.raises(SystemExit) as caught:
        registration.register()
    assert caught.value.code == 1
    assert "--rdzv-backend=etcd-v3" in capsys.readouterr().err


def test_a_failed_takeover_leaves_other_backends_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torchrun with another backend goes on, with a message on stderr, and `etcd-v3` still works."""
    import torch.distributed.elastic.rendezvous.api as api

    monkeypatch.setattr(api, "rendezvous_handler_registry", object())
    monkeypatch.setattr(sys, "argv", ["torchrun", "--rdzv-backend=c10d", "train.py"])
    assert registration.register() is registration.create
    assert "could not take over" in capsys.readouterr().err


def test_the_takeover_is_announced_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With how to turn it off, except to users who ask for `etcd-v3`."""
    ask("etcd", mode="resident")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "elastic3d serves --rdzv-backend=etcd" in said
    assert "ELASTIC3D_TAKE_OVER_ETCD=0" in said
    ask("etcd-v3", mode="resident")
    assert "elastic3d serves" not in capsys.readouterr().err
