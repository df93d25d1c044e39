"""MLflow, with its own client and a store of files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic3d.errors import TrackerError
from elastic3d.trackers.mlflow_runs import MOST, MlflowRuns
from elastic3d.trackers.tracker import Position
from tests.trackers.heard import CONFIG, put


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # The client comes without SQL, which a store in a database needs.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "mlruns").as_uri()


def history(uri: str, run: int = 0, key: str = "loss") -> list[tuple[int, float]]:
    """Return the points of the newest run but `run`, in the order in which they came."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("gpt")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    return [(one.step, one.value) for one in client.get_metric_history(runs[run].info.run_id, key)]


def test_a_curve_goes_on_after_a_restart(uri: str) -> None:
    """In the same run, found by the job's id; a value that is not finite stops nothing."""
    one = MlflowRuns("gpt", uri)
    assert one.open("it's r", CONFIG) is None
    put(one, 1, 3)
    one.close()
    other = MlflowRuns("gpt", uri)
    assert other.open("it's r", CONFIG) == Position(3, 1)
    put(other, 4, 5, generation=2)
    other.write(6, {"loss": math.nan, "generation": 2}, 1.0)
    other.flush()
    assert [step for step, _ in history(uri)] == [1, 2, 3, 4, 5, 6]
    assert other.open("it's r", CONFIG) == Position(6, 2)
    assert MlflowRuns("gpt", uri).open("another", CONFIG) is None


def test_an_experiment_that_another_one_makes_at_the_same_time_is_taken(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for it and its making: two jobs begin together, or a writer wakes up beside its successor."""
    from mlflow.tracking import MlflowClient

    look = MlflowClient.get_experiment_by_name

    def overtaken(client: MlflowClient, name: str) -> None:
        monkeypatch.setattr(MlflowClient, "get_experiment_by_name", look)
        client.create_experiment(name)

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", overtaken)
    runs = MlflowRuns("gpt", uri)
    assert runs.open("r", CONFIG) is None
    put(runs, 1, 3)
    assert [step for step, _ in history(uri)] == [1, 2, 3]


def test_a_former_writer_finds_that_another_one_writes(uri: str) -> None:
    """It was cut off with points in hand, and sends none of them."""
    old, new = MlflowRuns("gpt", uri), MlflowRuns("gpt", uri)
    old.open("r", CONFIG)
    put(old, 1, 3)
    assert new.open("r", CONFIG) == Position(3, 1)
    with pytest.raises(TrackerError, match="another process writes"):
        put(old, 4, 9)
    put(new, 4, 5)
    assert [step for step, _ in history(uri)] == [1, 2, 3, 4, 5]


def test_a_batch_that_fails_leaves_every_step_whole_or_out(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server went away while many points were sent; what is read back then is where to go on."""
    from mlflow.tracking import MlflowClient

    names = ["loss", "generation", *(f"own/{number}" for number in range(11))]

    def write(tracker: MlflowRuns, first: int, last: int) -> None:
        for step in range(first, last + 1):
            tracker.write(step, dict.fromkeys(names, 1.0), 1000.0)
        tracker.flush()

    sent: list[int] = []
    real = MlflowClient.log_batch

    def fails_once(client: MlflowClient, run_id: str, metrics: Sequence[Any]) -> None:
        sent.append(len(metrics))
        if len(sent) == 2:
            raise OSError("the server went away")
        real(client, run_id, metrics=metrics)

    monkeypatch.setattr(MlflowClient, "log_batch", fails_once)
    one = MlflowRuns("gpt", uri)
    one.open("r", CONFIG)
    with pytest.raises(OSError, match="went away"):
        write(one, 1, 100)
    one.close()
    position = one.open("r", CONFIG)
    assert position is not None
    write(one, position.step + 1, 100)
    assert max(sent) <= MOST
    for name in names:
        assert [step for step, _ in history(uri, key=name)] == list(range(1, 101)), name


def test_after_a_run_went_back_the_newest_point_is_that_of_the_later_generation(uri: str) -> None:
    """MLflow cannot forget: it has both points of these steps, and where to go on is still known."""
    one = MlflowRuns("gpt", uri)
    one.open("r", CONFIG)
    put(one, 1, 6)
    assert not one.rewind(3)
    put(one, 4, 5, generation=2, salt=7.0)
    assert [step for step, _ in history(uri)] == [1, 2, 3, 4, 5, 6, 4, 5]
    assert MlflowRuns("gpt", uri).open("r", CONFIG) == Position(5, 2)


def test_a_run_that_begins_again_gets_another_run(uri: str) -> None:
    """The earlier one stays as it was."""
    one = MlflowRuns("gpt", uri)
    one.open("r", CONFIG)
    put(one, 1, 3)
    assert one.rewind(0)
    put(one, 1, 2)
    assert MlflowRuns("gpt", uri).open("r", CONFIG) == Position(2, 1)
    assert len(history(uri, 0)) == 2
    assert len(history(uri, 1)) == 3
