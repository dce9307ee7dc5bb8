"""`noise=…`: the forecast of the gradient's noise, from numbers, a CSV file or a run."""

from __future__ import annotations

from pathlib import Path

from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from fasop.errors import SearchError
from fasop.trainings.noise import NUMBERS, measured, of_numbers, read_csv
from megatron_ext.contract.adaptive.expected import Noise
from reports.readers.decisions import Decision, decisions


def forecast(text: str, samples: float, runs_dir: Path) -> tuple[Noise, str | None]:
    """Of a training of so many samples, and in words what of it is not known.

    Raises:
        SearchError: there is none.
        RunFolderError: there is no such run.
    """
    if NUMBERS.fullmatch(text):
        return of_numbers(text, samples), None
    file = Path(text)
    noise = read_csv(file) if file.suffix == ".csv" else _of_run(text, runs_dir)
    last = noise.samples[-1]
    note = None
    if last < 0.99 * samples:
        note = (
            f"noise={text} ends after {last:,.0f} of {samples:,.0f} samples; the noise scale is assumed to stay at "
            f"{noise.scales[-1]:.4g}"
        )
    return noise, note


def _of_run(name: str, runs_dir: Path) -> Noise:
    run = RunDir.find(runs_dir, name)
    try:
        lines = run.decisions.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise SearchError(
            f"noise={name}: {run.path} has no decisions.jsonl, because its batch did not adapt; name a run with "
            "adapt.rule=noise, similarity or goodput"
        ) from error
    except OSError as error:
        raise RunFolderError(f"{run.decisions}: {error.strerror}") from error
    made = [one for one in decisions(lines, []) if isinstance(one, Decision)]
    points = {float(one.consumed_samples): one.noise_scale for one in reversed(made)}
    return measured(sorted(points.items()), name)
