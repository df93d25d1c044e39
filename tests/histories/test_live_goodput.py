"""What a job's leaders keep in etcd of where its time went, against the event files of all its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.playing.play import play
from chaos.servers.etcd import EtcdServer
from elastic3d import etcd_keys as keys
from elastic3d.accounting.goodput import goodput
from elastic3d.accounting.live_record import GoodputRecord
from elastic3d.accounting.node_spans import node_spans
from elastic3d.accounting.recorded_events import SECOND
from elastic3d.cli.events_folder import read_run
from elastic3d.etcd import EtcdClient
from elastic3d.membership.records import decode
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, faults, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

COUNTED = ("useful", "preparing", "restoring", "forming", "data", "saving", "slow", "waiting")
"""Categories that the leader knows as well as the files do; others it cannot, or not alone."""


@pytest.mark.long
def test_the_account_goes_on_when_the_leader_is_killed(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Twice: all steps are counted once, and no category is a twelfth of the held time off what the files say."""
    outcome = held(play(LONG, faults("leader@20", "leader@34"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(LONG))
    assert [view.cause for view in outcome.picture.generations] == ["start", "death", "death"]
    assert not [event for event in outcome.events if event.name == "goodput.restarted"]
    read = read_run(tmp_path / "job" / "events")
    files = goodput(read.run_id, read.run, node_spans(read.run), read.clocks)
    key = f"/elastic3d/{read.run_id}/{keys.GOODPUT}"
    with EtcdClient(job_etcd.endpoint) as client:
        item = client.get(key)
    assert item is not None
    record = decode(GoodputRecord, item.value, key)
    assert record.steps == files.steps == LONG.steps
    tolerance = files.held / SECOND / 12
    for category, spent in files.by_category.items():
        if category in COUNTED:
            known = record.by_category.get(category, 0) / SECOND
            assert known == pytest.approx(spent / SECOND, abs=tolerance), category
    lost = sum(record.by_category.get(name, 0) for name in ("repeated", "noticing")) / SECOND
    exact = sum(spent for name, spent in files.by_category.items() if name in ("repeated", "noticing")) / SECOND
    assert lost == pytest.approx(exact, abs=tolerance)
    assert set(record.by_cause) == {"start", "death"}
    assert len(item.value) < 8192
