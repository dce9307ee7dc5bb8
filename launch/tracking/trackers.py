"""The trackers: TensorBoard's event files, Weights & Biases, and MLflow. Each imports its library when it is opened."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from conf.visible import without_passwords
from launch.files.locks import FileLock
from launch.tracking.run_info import Subject
from launch.tracking.series import Point

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run


class TensorBoard:
    """One file, written anew by each start: it then has every point once."""

    def __init__(self, subject: Subject) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.hparams import summary_v2 as hparams
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = subject.folder / "tensorboard"
        before = list(folder.glob("events.out.tfevents.*"))
        self._writer = EventFileWriter(str(folder), flush_secs=5)
        began = subject.launched_unix
        # A TensorBoard that is open drops what it had read of the file before.
        self._writer.add_event(Event(wall_time=began, session_log=SessionLog(status=SessionLog.START)))
        shown = [hparams.Metric(tag) for tag in ("train/loss", "valid/loss")]
        for summary in (
            hparams.hparams_config_pb(hparams=[], metrics=shown),
            hparams.hparams_pb(dict(subject.parameters), trial_id=subject.name, start_time_secs=began),
        ):
            self._writer.add_event(Event(wall_time=began, summary=summary))
        self._writer.flush()
        for path in before:
            path.unlink()
        self.place = str(folder)

    def write(self, points: Iterable[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.unix, step=point.iteration, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        self._writer.close()


class WandB:
    """Online a start goes on behind the last step that Weights & Biases has. Offline it writes a folder with all
    points, in the place of the one before: `wandb sync` does not join folders of one run."""

    def __init__(self, subject: Subject) -> None:
        import wandb

        for folder in (subject.folder / "wandb").glob(f"offline-run-*-{subject.id}"):
            shutil.rmtree(folder)
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or subject.group,
            id=subject.id,
            name=subject.name,
            notes=subject.overrides,
            config=dict(subject.parameters) | {"commit": subject.commit},
            dir=str(subject.folder),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
        )
        offline = self._run.settings.mode == "offline"
        self._from = 0 if offline else self._run.step
        self.place = str(subject.folder / "wandb") if offline else str(self._run.url)

    def write(self, points: Iterable[Point]) -> None:
        for point in points:
            if point.iteration >= self._from:
                self._run.log(dict(point.values), step=point.iteration)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
        self._teardown()  # it may still be writing


T = TypeVar("T")
ID = "tdpp.id"
"""The tag by which a run is found again."""
MOST_METRICS, MOST_PARAMETERS, MOST_LETTERS = 1000, 100, 6000
"""That MLflow takes at once, and of a parameter's value."""


class MLflow:
    """Goes on behind the last step that each series has."""

    def __init__(self, subject: Subject) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before the import
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # who names a folder means it
        own = subject.runs / "mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{own}"
        with FileLock(own.with_name(".mlflow.lock")) as lock:  # of runs that start together one makes the tables
            while not lock.try_take(fcntl.LOCK_EX):
                time.sleep(0.1)
            self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or subject.group)
        found = self._client.search_runs([experiment], f"tags.`{ID}` = '{subject.id}'", max_results=1)
        run = found[0] if found else self._created(experiment, subject)
        self._id = run.info.run_id
        if found:
            self._client.update_run(self._id, status="RUNNING")
        self._last = {name: self._last_step(name) for name in run.data.metrics}
        self.place = without_passwords(uri)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run of the name has made it meanwhile
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)

    def _created(self, experiment: str, subject: Subject) -> Run:
        from mlflow.entities import Param

        began = int(subject.launched_unix * 1e3)
        tags = {ID: subject.id, "mlflow.note.content": subject.overrides, "mlflow.source.git.commit": subject.commit}
        run = self._client.create_run(experiment, start_time=began, tags=tags, run_name=subject.name)
        parameters = [Param(key, str(value)[:MOST_LETTERS]) for key, value in subject.parameters.items()]
        for some in _parts(parameters, MOST_PARAMETERS):
            self._client.log_batch(run.info.run_id, params=some)
        return run

    def _last_step(self, name: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._id, name)), default=-1)

    def write(self, points: Iterable[Point]) -> None:
        for some in _parts(self._metrics(points), MOST_METRICS):
            self._client.log_batch(self._id, metrics=some)
            self._last |= {metric.key: metric.step for metric in some}

    def _metrics(self, points: Iterable[Point]) -> Iterator[Metric]:
        from mlflow.entities import Metric

        for point in points:
            for name, value in point.values.items():
                key = re.sub(r"[^\w.:/ -]", "_", name)
                if point.iteration > self._last.get(key, -1):
                    yield Metric(key, value, int(point.unix * 1e3), point.iteration)

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


def _parts(values: Iterable[T], most: int) -> Iterator[Sequence[T]]:
    left = iter(values)
    while some := list(islice(left, most)):
        yield some
