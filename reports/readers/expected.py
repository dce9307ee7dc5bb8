"""What was to be expected of a run: its plan, predicted from its frozen configuration."""

from __future__ import annotations

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from fasop.simulation.predict import Prediction, predict
from reports.readers.record import Record


def expected(run: RunDir, record: Record) -> tuple[Prediction | None, tuple[str, ...]]:
    """The prediction, or none and why, as notes for the page."""
    experiment = record.experiment
    if experiment is None:
        return None, ()  # the record has a note on it
    try:
        schedule = run.read_json(run.schedule) if record.plan.schedule_file else None
        prediction = predict(experiment, schedule)
    except TdppError as error:
        return None, (f"no prediction: {error}",)
    if len(prediction.stages) != record.plan.pipeline:
        return None, ("no prediction: config.yaml has another number of stages than plan.json",)
    return prediction, ()
