"""--rdzv-endpoint, --rdzv-id, --nnodes and --rdzv-conf: accepted values, and the error of every wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from elastic3d import environment
from elastic3d.errors import ConfigurationError
from elastic3d.notices import Choice, NoticeOptions
from elastic3d.rendezvous.settings import Settings, from_environment, from_parameters, own_address


def parameters(run_id: str = "job", endpoint: str = "127.0.0.1:2379", nodes: str = "1:4", **conf: Any) -> Any:
    """Return the parameters that torchrun passes to a handler."""
    least, most = map(int, nodes.split(":"))
    return RendezvousParameters(
        backend="etcd", endpoint=endpoint, run_id=run_id, min_nodes=least, max_nodes=most, **conf
    )


def test_default_settings() -> None:
    """Without --rdzv-conf: restart mode, default times, this host's address on the way to etcd."""
    settings = from_parameters(parameters(nodes="2:5", timeout=900))
    assert (settings.mode, settings.prefix, settings.address) == ("restart", "/elastic3d", "127.0.0.1")
    assert (settings.policy.minimum, settings.policy.maximum, settings.policy.beside) == (2, 5, False)
    assert (settings.policy.lease, settings.policy.below_minimum) == (3.0, 900.0)
    assert settings.root == "/elastic3d/job/"
    assert settings.node


def test_a_machine_is_identified_by_a_stable_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given name, else the host of a label or a scheduler; a generated name ends with its process."""
    assert from_parameters(parameters()).home == ""
    assert from_parameters(parameters(labels="host:h3")).home == "h3"
    assert from_parameters(parameters(labels="host:h3", node="n1")).home == ""
    monkeypatch.setenv("SLURMD_NODENAME", "tux7")
    assert from_parameters(parameters()).home == "tux7"


def test_every_setting_is_parsed() -> None:
    """In ms, s, m or plain seconds."""
    settings = from_parameters(
        parameters(
            mode="resident",
            prefix="/team/a/",
            node="n1",
            user="u",
            password_file="/p",
            ca="/ca",
            cert="/cert",
            key="/key",
            gate="/gate",
            lease="4",
            grace="1500ms",
            last_call="2.5s",
            gather="100ms",
            timeout="5m",
            orphan="1m",
            tries="7",
            labels="zone:z/host:h",
            admission="off",
            standby="off",
            chaos="allow",
            notices="gcp",
            notices_url="http://127.0.0.1:8080",
            notices_rebalance="drain",
            multiple_of="2",
            counts="4/2",
            budget="12",
            damping="500ms",
            flaps="5",
            quarantine="2m",
            flap_memory="30m",
        )
    )
    assert settings.home == "", "a given name is the same at each start"
    assert (settings.labels, settings.admission) == ({"zone": "z", "host": "h"}, False)
    assert not settings.standby
    assert settings.chaos
    policy = settings.policy
    assert (settings.mode, settings.node, settings.root) == ("resident", "n1", "/team/a/job/")
    assert (settings.user, settings.password_file, settings.gate) == ("u", "/p", "/gate")
    assert (settings.ca, settings.cert, settings.key) == ("/ca", "/cert", "/key")
    assert (policy.lease, policy.grace, policy.first_gather, policy.gather) == (4.0, 1.5, 2.5, 0.1)
    assert (policy.below_minimum, policy.orphan, policy.tries, policy.beside) == (300.0, 60.0, 7, True)
    assert settings.notices == NoticeOptions(choice=Choice.GCP, url="http://127.0.0.1:8080", rebalance=True)
    assert (policy.multiple_of, policy.counts, policy.budget, policy.damping) == (2, (2, 4), 12, 0.5)
    assert (policy.flaps, policy.quarantine, policy.flap_memory) == (5, 120.0, 1800.0)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"speed": "9"}, "unknown key(s) speed"),
        ({"leese": "3", "greace": "1"}, "unknown key(s) greace, leese; known are mode"),
        ({"mode": "fast"}, "mode=fast: choose restart"),
        ({"lease": "soon"}, "lease=soon: give seconds"),
        ({"lease": "-3"}, "lease=-3: give seconds"),
        ({"lease": "3d"}, "lease=3d: give seconds"),
        ({"lease": "nan"}, "lease=nan: give seconds"),
        ({"lease": ""}, "lease=: give seconds"),
        ({"lease": "1"}, "cannot keep leases below 2 s"),
        ({"lease": "0"}, "cannot keep leases below 2 s"),
        ({"grace": "1  s"}, "grace=1  s: give seconds"),
        ({"last_call": "x"}, "last_call=x"),
        ({"gather": "1e3"}, "gather=1e3"),
        ({"timeout": "never"}, "timeout=never"),
        ({"orphan": "."}, "orphan=."),
        ({"drain": "soon"}, "drain=soon: give seconds"),
        ({"drain": "0"}, "drain=0: torchrun kills its workers 30 s after"),
        ({"drain": "29"}, "at most 28 s, or allow torchrun more time by TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        ({"tries": "0"}, "tries=0: give at least 1"),
        ({"tries": "-1"}, "tries=-1: give a whole number"),
        ({"tries": "1.5"}, "tries=1.5: give a whole number"),
        ({"tries": "²"}, "tries=²: give a whole number"),
        ({"multiple_of": "0"}, "multiple_of=0: at least 1"),
        ({"counts": "2,4"}, "counts=2,4: give whole numbers, as in counts=2/4/8"),
        ({"counts": "two"}, "counts=two: give whole numbers"),
        ({"counts": "2/400"}, "400 not within --nnodes"),
        ({"budget": "-1"}, "budget=-1: give a whole number"),
        ({"flaps": "often"}, "flaps=often: give a whole number"),
        ({"damping": "a while"}, "damping=a while: give seconds"),
        ({"quarantine": "0"}, "a quarantine must last some time"),
        ({"quarantine": "90m"}, "end before what led to it is forgotten"),
        ({"node": "a/b"}, "node=a/b"),
        ({"labels": "rack=r1"}, "labels=rack=r1"),
        ({"admission": "maybe"}, "admission=maybe: choose on or off"),
        ({"standby": "2"}, "standby=2: choose on or off"),
        ({"chaos": "on"}, "chaos=on: choose allow or off"),
        ({"chaos": "allow"}, "chaos=allow: in mode restart no keeper is there"),
        ({"node": "a b"}, "node=a b"),
        ({"prefix": "/"}, "prefix=/"),
        ({"cert": "/c"}, "cert and key"),
        ({"key": "/k"}, "cert and key"),
        ({"user": "u"}, "user and password_file"),
        ({"password_file": "/p"}, "user and password_file"),
        ({"notices": "ibm"}, "notices=ibm: choose one of auto, none, aws, gcp, azure"),
        ({"notices_url": "host"}, "notices_url=host: give"),
        ({"notices_rebalance": "yes"}, "notices_rebalance=yes: choose log"),
    ],
)
def test_wrong_values_are_refused(conf: dict[str, str], message: str) -> None:
    """The error quotes them."""
    with pytest.raises(ConfigurationError) as caught:
        from_parameters(parameters(**conf))
    assert message in str(caught.value)


def test_a_drain_fits_into_the_time_torchrun_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 s by default, less if torchrun kills its workers sooner, more if it is told to wait longer."""
    assert from_parameters(parameters()).drain == 25.0
    assert from_parameters(parameters(drain="10s")).drain == 10.0
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    assert from_parameters(parameters(drain="110")).drain == 110.0
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
    assert from_parameters(parameters()).drain == 8.0


@pytest.mark.parametrize("run_id", ["a/b", "with space", "", "x" * 129, "ä", "a\n"])
def test_wrong_run_ids_are_refused(run_id: str) -> None:
    """A run id has to be one part of an etcd key."""
    given = parameters()
    given.run_id = run_id
    with pytest.raises(ConfigurationError, match="--rdzv-id"):
        from_parameters(given)


@pytest.mark.parametrize("endpoint", ["", "  "])
def test_a_missing_endpoint_is_refused_with_an_example(endpoint: str) -> None:
    """Without an endpoint the error shows one."""
    with pytest.raises(ConfigurationError, match=r"--rdzv-endpoint is missing.*host:2379"):
        from_parameters(parameters(endpoint=endpoint))


def test_a_minimum_above_the_maximum_is_refused() -> None:
    """--nnodes=3:2, which torch's own check accepts under -O."""
    given = parameters()
    given.min_nodes, given.max_nodes = 3, 2
    with pytest.raises(ConfigurationError, match="--nnodes=3:2"):
        from_parameters(given)


def test_an_unknown_host_is_named() -> None:
    """With what to do; where there are several, all of them."""
    with pytest.raises(ConfigurationError, match=r"host\.invalid cannot be resolved.*--local-addr"):
        own_address("http://host.invalid:2379")
    with pytest.raises(ConfigurationError, match=r"host\.invalid and other\.invalid cannot be resolved"):
        own_address("host.invalid:2379, other.invalid")
    with pytest.raises(ConfigurationError, match="no host is named"):
        own_address(",")


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:2379",
        "http://127.0.0.1:2379",
        "127.0.0.1",
        "localhost:1,other.invalid:2",
        "host.invalid:2379,127.0.0.1:2379",
        " , 127.0.0.1:2379",
    ],
)
def test_the_own_address_is_that_on_the_way_to_etcd(endpoint: str) -> None:
    """With or without a scheme, a port and further endpoints, of which some may not resolve."""
    assert own_address(endpoint) == "127.0.0.1"


@pytest.mark.parametrize("endpoint", ["[::1]:2379", "https://[::1]:2379"])
def test_ipv6_endpoints_are_understood(endpoint: str) -> None:
    """Bracketed IPv6 addresses."""
    try:
        assert own_address(endpoint) == "::1"
    except ConfigurationError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_settings_survive_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keepers get exactly the agent's settings; the password itself stays in its file."""
    secret = tmp_path / "password"
    secret.write_text("correct horse\n")
    settings = from_parameters(
        parameters(mode="resident", user="u", password_file=str(secret), grace="250ms", tries="2")
    )
    text = settings.to_environment()
    assert "correct horse" not in text
    assert settings.password() == "correct horse"
    monkeypatch.setenv(environment.RENDEZVOUS.name, text)
    assert from_environment() == settings
    monkeypatch.delenv(environment.RENDEZVOUS.name)
    assert from_environment() is None


def test_an_unreadable_password_file_is_named() -> None:
    """A missing file has an error of its own."""
    settings: Settings = from_parameters(parameters(user="u", password_file="/no/such/file"))
    with pytest.raises(ConfigurationError, match="/no/such/file"):
        settings.password()


def test_settings_of_torchs_own_backends_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """Translated where we have a counterpart; else a line says that it has no effect, and why."""
    settings = from_parameters(
        parameters(
            endpoint="127.0.0.1:2379",
            protocol="https",
            etcd_prefix="/torchelastic/p2p",
            last_call_timeout="7",
            timeout="900",
            join_timeout="120",
            cacert="/ca",
            cert="/cert",
            key="/key",
            is_host="true",
            keep_alive_interval="5",
        )
    )
    assert (settings.endpoints, settings.prefix) == ("https://127.0.0.1:2379", "/torchelastic/p2p")
    assert (settings.policy.first_gather, settings.policy.below_minimum) == (7.0, 120.0)
    assert (settings.ca, settings.cert, settings.key) == ("/ca", "/cert", "/key")
    said = capsys.readouterr().err
    assert "is_host=true has no effect" in said
    assert "keep_alive_interval=5 has no effect" in said
    assert "etcd_prefix" not in said


def test_contradictory_settings_are_refused() -> None:
    """One setting under two names with two values is an error, as is an unknown protocol."""
    with pytest.raises(ConfigurationError, match="prefix and etcd_prefix"):
        from_parameters(parameters(prefix="a", etcd_prefix="b"))
    with pytest.raises(ConfigurationError, match="choose http or https"):
        from_parameters(parameters(protocol="ftp"))


@pytest.mark.parametrize(("mode", "seconds"), [("restart", 30.0), ("resident", 3.0)])
def test_last_call_applies_only_in_restart_mode(mode: str, seconds: float) -> None:
    """30 s for late nodes, which cost everybody a restart; a keeper admits them beside those that train."""
    assert from_parameters(parameters(mode=mode)).policy.first_gather == seconds
