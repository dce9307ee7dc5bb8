"""What iterations were to take by a profile that the same GPU was measured with, and what they took."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.prepare import Case, ProfileCase, experiment_of, profile_of
from conf.run_folder.rundir import RunDir
from fasop.costs.profiles.profile_text import profile_text
from fasop.simulation.predict import predict
from launch.control.planning.plan import make_plan
from launch.profile.findings import merged, read_found


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Holds the prediction of a case."""

    case: str
    ms: float
    mib: float
    """With the allowance for what no tensor shows."""


def predictions(
    noted: Mapping[str, Any], of: ProfileCase, cases: Mapping[str, Case], folder: Path
) -> Iterator[Predicted]:
    """Predicts all cases that a profile is for, from what its rank noted; the profile goes into this folder.

    Raises:
        TdppError: the profile is not complete.
    """
    experiment = profile_of(of, cases)
    with TemporaryDirectory() as name:
        run = RunDir(Path(name))
        run.plan.write_text(json.dumps(make_plan(experiment, "profile").as_json()))
        run.profile_rank(0).parent.mkdir()
        run.profile_rank(0).write_text(json.dumps(noted))
        (gpu,) = experiment.cluster.gpus
        profile = merged(read_found(run, experiment), gpu, "measured by benchmarks.gpu_training", "")
    path = folder / "profile.yaml"
    path.write_text(profile_text(profile, ""))
    for case in of.predicted:
        found = predict(experiment_of(cases[case], Path("data"), f"cluster.gpus.{gpu}.profile={path}"))
        (stage,) = found.stages
        yield Predicted(case=case, ms=found.iteration_s * 1e3, mib=stage.memory_gib * 1024)
