"""What trackers say that they have of a run: by series, the values by iteration, each as often as it is there."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from conf.run_folder.rundir import RunDir
from conf.schema.profile import Tracker

if TYPE_CHECKING:  # their imports take 2 CPU seconds of every process of the tests
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

Found = dict[str, list[tuple[int, float]]]
BLOCK = 1 << 15


def found(kind: Tracker, run: RunDir) -> Found:
    """As the tracker's own library reads it."""
    return {Tracker.tensorboard: in_tensorboard, Tracker.wandb: in_wandb, Tracker.mlflow: in_mlflow}[kind](run)


def in_tensorboard(run: RunDir) -> Found:
    if not (folder := run.path / "tensorboard").is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def in_wandb(run: RunDir) -> Found:
    """Of the folders that `wandb sync` would send."""
    series: Found = defaultdict(list)
    for record in offline_records(run):
        if record.HasField("history"):
            line = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = line.pop("_step", record.history.step.num)
            for name, value in line.items():
                if not name.startswith("_"):
                    series[name].append((step, value))
    return dict(series)


def offline_records(run: RunDir) -> Iterator[Record]:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for path in sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb")):
        for text in _log_records(path):
            record = Record()
            record.ParseFromString(text)
            yield record


def _log_records(path: Path) -> Iterator[bytes]:
    """Of a file in LevelDB's log format: blocks of 32 KiB; in them parts of records, behind checksum, length, kind."""
    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        room = BLOCK - at % BLOCK
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or a last part
            yield parts
            parts = b""


def mlflow_runs(run: RunDir) -> list[Run]:
    client = _client(run)
    return list(client.search_runs([one.experiment_id for one in client.search_experiments()]))


def in_mlflow(run: RunDir) -> Found:
    client = _client(run)
    (known,) = [one for one in mlflow_runs(run) if one.info.run_name == run.path.name]
    histories = {name: client.get_metric_history(known.info.run_id, name) for name in known.data.metrics}
    return {name: sorted((one.step, one.value) for one in history) for name, history in histories.items()}


def _client(run: RunDir) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{run.runs / 'mlflow.db'}")
