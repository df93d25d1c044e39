"""MLflow: one run of an experiment for each job, found again by a tag.

MLflow keeps everything it is sent, a step that is sent twice as two points. So what it has is read back first, and a
tag says who writes: a former writer that finds another one there stops. Between that look and what it then sends
another may have begun: that much cannot be fenced off here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from elastic3d.errors import TrackerError
from elastic3d.trackers.tracker import Position, Tracker

RUN, WRITER = "elastic3d.job", "elastic3d.written_by"
"""Tags of a run: the job's id, and who writes."""

GENERATION = "generation"

MOST = 1000
"""Metrics in one batch, at most: what MLflow allows. A step has far fewer."""


class MlflowRuns(Tracker):
    """Writes to a run of an MLflow experiment. uri: of the tracking server, None for what MLflow is set to."""

    def __init__(self, experiment: str, uri: str | None = None) -> None:
        self._experiment, self._uri = experiment, uri
        self._client: Any = None
        self._id = self._name = self._token = ""
        self._points: list[tuple[int, dict[str, float], float]] = []

    @property
    def every(self) -> float:
        """Seconds from one flush to the next."""
        return 5.0

    def open(self, run_id: str, config: Mapping[str, str | int]) -> Position | None:
        """Find the newest run of this job, or make one, and read back up to where it has points."""
        from mlflow.tracking import MlflowClient

        self._points.clear()
        self._name = run_id
        self._client = client = MlflowClient(tracking_uri=self._uri)
        experiment = self._found_or_made()
        runs = client.search_runs(
            [experiment], f"tags.`{RUN}` = '{_tag(run_id)}'", max_results=1, order_by=["attributes.start_time DESC"]
        )
        if not runs:
            self._make(experiment)
            self._describe(config)
            return None
        self._id = runs[0].info.run_id
        self._claim()
        client.update_run(self._id, status="RUNNING")
        points = [(int(one.value), one.step) for one in client.get_metric_history(self._id, GENERATION)]
        self._describe(config)
        if not points:
            return None
        # Not the highest step: after the run went back, the points of a later generation are the newest.
        generation, step = max(points)
        return Position(step, generation)

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Keep a point for the next flush."""
        self._points.append((step, dict(values), at))

    def flush(self) -> None:
        """Send the points, if nobody else writes by now, each in one batch: it is there as a whole or not at all."""
        from mlflow.entities import Metric

        points, self._points = self._points, []
        batch: list[Metric] = []
        for step, values, at in points:
            point = [Metric(name, value, int(at * 1000), step) for name, value in values.items()]
            if len(batch) + len(point) > MOST:
                self._send(batch)
                batch = []
            batch += point
        if batch:
            self._send(batch)

    def rewind(self, step: int) -> bool:
        """Make another run of the same job for one that begins again; else nothing, for points cannot be removed."""
        if step:
            return False
        self._make(self._client.get_run(self._id).info.experiment_id)
        return True

    def close(self) -> None:
        """Forget what was not sent: this node may no longer be the one that writes."""
        self._points.clear()
        self._client = None

    def _send(self, metrics: Sequence[Any]) -> None:
        writer = self._client.get_run(self._id).data.tags.get(WRITER)
        if writer != self._token:
            raise TrackerError(f"another process writes to MLflow's run {self._id} now")
        self._client.log_batch(self._id, metrics=metrics)

    def _found_or_made(self) -> str:
        """Return the id of the experiment, whoever makes it first."""
        from mlflow.exceptions import MlflowException

        there = self._client.get_experiment_by_name(self._experiment)
        if there is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except MlflowException:
                there = self._client.get_experiment_by_name(self._experiment)
                if there is None:
                    raise
        return str(there.experiment_id)

    def _make(self, experiment: str) -> None:
        made = self._client.create_run(experiment, run_name=self._name, tags={RUN: _tag(self._name)})
        self._id = made.info.run_id
        self._claim()

    def _claim(self) -> None:
        self._token = secrets.token_hex(8)
        self._client.set_tag(self._id, WRITER, self._token)

    def _describe(self, config: Mapping[str, str | int]) -> None:
        # As tags: parameters cannot be changed, and who trains does.
        for name, value in config.items():
            self._client.set_tag(self._id, f"elastic3d.{name}", str(value))


def _tag(run_id: str) -> str:
    """Return the job's id as a text that a search of MLflow can name."""
    return re.sub(r"['\"`\\]", "_", run_id)
