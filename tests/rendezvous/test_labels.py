"""Where labels come from, and which source takes precedence."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elastic3d.errors import ConfigurationError
from elastic3d.rendezvous.labels import labels_of, read_file

POD = """\
topology.kubernetes.io/region="eu"
topology.kubernetes.io/zone="eu-1"
kubernetes.io/hostname="worker-7"
elastic3d/rack="r7"
job="gpt"
broken
odd="\\q"
"""


def labels(
    conf: str = "", environment: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None
) -> dict[str, str]:
    def read(path: str) -> str:
        if path not in (files or {}):
            raise FileNotFoundError(2, "No such file or directory", path)
        return (files or {})[path]

    return labels_of(conf, environment or {}, "me.example", read)


def test_the_default_host_label_is_this_host() -> None:
    """Two keepers on one machine are known to share it."""
    assert labels() == {"host": "me.example"}


def test_labels_are_read_from_the_command_line() -> None:
    """All levels, in one value that torchrun does not split."""
    expected = {"zone": "eu1", "rack": "r7", "switch": "s2", "host": "h3"}
    assert labels("zone:eu1/rack:r7/switch:s2/host:h3") == expected
    assert list(labels("host:h3/zone:eu1")) == ["zone", "host"]


def test_labels_are_read_from_the_environment() -> None:
    """As a person writes them in a script."""
    assert labels(environment={"ELASTIC3D_LABELS": "zone=eu1,rack=r7"}) == {
        "zone": "eu1",
        "rack": "r7",
        "host": "me.example",
    }


@pytest.mark.parametrize(
    ("address", "pattern", "expected"),
    [
        ("tux1", "node", {"host": "tux1"}),
        ("s4.tux1", "switch.node", {"switch": "s4", "host": "tux1"}),
        ("s0.s4.tux1", "switch.switch.node", {"rack": "s0", "switch": "s4", "host": "tux1"}),
        (
            "core.hall.s0.s4.tux1.example",
            "switch.switch.switch.switch.node",
            {"zone": "core.hall", "rack": "s0", "switch": "s4", "host": "tux1.example"},
        ),
        ("s[0-1].s4.tux1", "switch.switch.node", {"rack": "s_0-1_", "switch": "s4", "host": "tux1"}),
        ("s4", "switch.node", {"host": "me.example"}),
        ("s4.s5", "switch.switch", {"host": "me.example"}),
        ("", "", {"host": "me.example"}),
    ],
)
def test_labels_are_read_from_slurms_topology(address: str, pattern: str, expected: dict[str, str]) -> None:
    """The switch next to the node, the one above as its rack; values that do not fit the pattern are ignored."""
    environment = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert labels(environment=environment) == expected


def test_the_host_label_is_slurms_node_name() -> None:
    """slurmd always sets it, and it is better than the address."""
    environment = {
        "SLURMD_NODENAME": "tux1",
        "SLURM_TOPOLOGY_ADDR": "s4.x",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node",
    }
    assert labels(environment=environment) == {"switch": "s4", "host": "tux1"}


def test_labels_are_read_from_kubernetes() -> None:
    """The downward API's file at its usual place; lines that are no labels are ignored."""
    assert labels(files={"/etc/podinfo/labels": POD}) == {"zone": "eu-1", "rack": "r7", "host": "worker-7"}
    assert labels(environment={"NODE_NAME": "worker-9"})["host"] == "worker-9"
    files = {"/x": 'topology.kubernetes.io/zone="a"\ntopology.kubernetes.io/region="eu"'}
    assert labels(environment={"ELASTIC3D_PODINFO": "/x"}, files=files)["zone"] == "eu.a"
    files = {"/x": 'topology.kubernetes.io/region="eu"\n'}
    assert labels(environment={"ELASTIC3D_PODINFO": "/x"}, files=files)["zone"] == "eu"


def test_the_nearer_source_wins_for_each_label() -> None:
    """Command line, then environment, then scheduler."""
    environment = {
        "ELASTIC3D_LABELS": "rack=environment,switch=environment",
        "SLURMD_NODENAME": "slurm",
        "SLURM_TOPOLOGY_ADDR": "a.b.c.slurm",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.switch.node",
    }
    assert labels("switch:flag", environment) == {
        "zone": "a",
        "rack": "environment",
        "switch": "flag",
        "host": "slurm",
    }


@pytest.mark.parametrize(
    ("conf", "environment", "message"),
    [
        ("rak:r7", {}, "'rak:r7' is not a label; write them as zone:eu1/rack:r7: names are zone, rack, switch, host"),
        ("rack", {}, "'rack' is not a label"),
        ("rack:", {}, "'rack:' is not a label"),
        ("rack:a b", {}, "'rack:a b' is not a label"),
        ("rack:a/", {}, "'' is not a label"),
        ("rack:a/rack:b", {}, "rack is there twice"),
        ("rack:" + "x" * 129, {}, "is not a label"),
        (
            "",
            {"ELASTIC3D_LABELS": "rack:r7"},
            "ELASTIC3D_LABELS=rack:r7: 'rack:r7' is not a label; write them as zone=eu1",
        ),
        ("", {"ELASTIC3D_PODINFO": "/no/such"}, "ELASTIC3D_PODINFO=/no/such cannot be read (No such file"),
    ],
)
def test_a_malformed_label_is_refused(conf: str, environment: dict[str, str], message: str) -> None:
    """One line that quotes it and shows a right one."""
    with pytest.raises(ConfigurationError) as caught:
        labels(conf, environment)
    assert message in str(caught.value)


def test_reading_a_machines_files_raises_the_expected_errors() -> None:
    """A folder is no file, a missing file is missing."""
    with pytest.raises(ConfigurationError, match="Is a directory"):
        labels_of("", {"ELASTIC3D_PODINFO": "/"}, "h", read_file)
    assert labels_of("", {}, "h", read_file)["host"] == "h"
