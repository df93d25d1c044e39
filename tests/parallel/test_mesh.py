from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from chaos.gpu.emulated_device import EmulatedDevice
from elastic3d.errors import LayoutError
from elastic3d.parallel.mesh import Mesh, join_world
from elastic3d.training import Run
from elastic3d.values import Layout
from tests.parallel.worlds import Orders, run_world

pytestmark = pytest.mark.gloo


def axes(run: Run) -> dict[str, list[list[int]]]:
    """Return the ranks in each group of this rank."""
    join_world(run._assignment, run._port.device)
    mesh = Mesh(run.layout, run.rank, run._port.device)
    groups = {name: _ranks(getattr(mesh, name)) for name in ("dp", "shard", "tp")}
    dist.barrier()
    return groups | {"pp": [dist.get_process_group_ranks(mesh.pp)] if mesh.pp else []}


def _ranks(mesh: DeviceMesh | None) -> list[list[int]]:
    return [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)] if mesh else []


def test_ranks_are_grouped_on_every_axis_by_their_places() -> None:
    """tp neighbours are innermost, replicas are outside their shards, and dp is both together."""
    reports = run_world(axes, Orders(layout=Layout(pp=1, dp=4, tp=2, replicas=2)))
    assert [report.error for report in reports] == [""] * 8
    assert reports[5].result == {"pp": [], "dp": [[1, 3, 5, 7]], "shard": [[1, 5], [5, 7]], "tp": [[4, 5]]}
    reports = run_world(axes, Orders(layout=Layout(pp=2, dp=2, tp=2)))
    assert [report.error for report in reports] == [""] * 8
    assert reports[5].result == {"pp": [[1, 5]], "dp": [[5, 7]], "shard": [[5, 7]], "tp": [[4, 5]]}


def connected(run: Run) -> dict[str, list[list[int]]]:
    """Return the ranks in each group that a device connects at once, and all axes in order."""
    device = EmulatedDevice(0)
    join_world(run._assignment, device)
    mesh = Mesh(run.layout, run.rank, device)
    dist.barrier()
    return {
        "connected": [dist.get_process_group_ranks(group) for group in device.connected],
        **{axis: [dist.get_process_group_ranks(group)] for axis, group in mesh.groups.items()},
    }


def test_all_groups_but_those_of_pipelines_are_connected_at_once() -> None:
    """In one order on every rank, or ranks would wait for each other in circles."""
    reports = run_world(connected, Orders(layout=Layout(pp=2, dp=2, tp=2)))
    assert [report.error for report in reports] == [""] * 8
    assert reports[5].result == {"connected": [[4, 5], [5, 7]], "tp": [[4, 5]], "dp": [[5, 7]], "pp": [[1, 5]]}
    assert all(list(report.result) == ["connected", "tp", "dp", "pp"] for report in reports)
    reports = run_world(connected, Orders(layout=Layout(pp=1, dp=4, replicas=2)))
    assert reports[3].result["connected"] == [[1, 3], [2, 3], [0, 1, 2, 3]]
    # The only axis is the whole world: its group is the default one.
    reports = run_world(connected, Orders(layout=Layout(pp=2, dp=1)))
    assert [report.result for report in reports] == [{"connected": [], "pp": [[0, 1]]}] * 2


def test_inconsistent_layouts_are_refused() -> None:
    """Replicas share dp evenly; while dp is free they may be any number."""
    with pytest.raises(LayoutError, match="2 replicas cannot share dp=3 evenly"):
        Layout(pp=1, dp=3, replicas=2)
    with pytest.raises(LayoutError, match="replicas must be a whole number, 0 for free or 1 and more; it is -1"):
        Layout(replicas=-1)
    assert Layout(replicas=3).replicas == 3


def test_a_free_tp_survives_serialisation() -> None:
    """tp=1 is a layout's default, so a free tp is written as 0."""
    for layout in (Layout(tp=0), Layout(tp=2, pp=2), Layout(), Layout(dp=4, replicas=0, cuts=(1, 3))):
        assert Layout.parse(layout.request()) == layout
