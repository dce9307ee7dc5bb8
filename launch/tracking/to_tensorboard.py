"""TensorBoard's event files: `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Iterable

from launch.tracking.series import Point
from launch.tracking.subject import Subject


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
