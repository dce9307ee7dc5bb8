"""What a tracker is given of a run once, and whether the trackers that a run names can be written to."""

from __future__ import annotations

import hashlib
import json
import netrc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conf.compose import read_experiment
from conf.errors import TdppError
from conf.run_folder.run_files import read_text
from conf.run_folder.rundir import RunDir
from conf.schema.profile import Tracker
from launch.errors import LaunchError
from launch.tracking.series import Scale

Parameter = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run, as trackers know it."""

    id: str
    """The same wherever the run's folder lies; no other run has it."""
    group: str
    """What it shares with the runs of its name: the project of Weights & Biases, the experiment of MLflow."""
    name: str
    """The name of its folder, which tells the runs of a sweep apart."""
    folder: Path
    runs: Path
    parameters: Mapping[str, Parameter]
    """Its configuration, by key; empty where config.yaml cannot be read."""
    overrides: str
    commit: str
    """Empty where it is not known."""
    iterations: int
    """The last one, if it reaches no other goal before."""
    launched_unix: float
    scale: Scale

    @classmethod
    def of(cls, run: RunDir) -> Subject:
        """Raises RunFolderError if it has no plan."""
        plan = run.read_plan()
        try:
            experiment = read_experiment(run.config)
        except TdppError:
            parameters, price = {}, None
        else:
            parameters, price = dict(_flat(asdict(experiment))), experiment.price_per_hour()
        origin = _known(run.provenance)
        unix = origin.get("unix")
        return cls(
            id=hashlib.sha256(f"{run.name}\n{unix}\n{origin.get('host')}".encode()).hexdigest()[:16],
            group=run.path.parent.name,
            name=run.path.name,
            folder=run.path,
            runs=run.runs,
            parameters=parameters,
            overrides=" ".join(_text(run.overrides).split("\n")).strip(),
            commit=str(origin.get("commit") or ""),
            iterations=plan.train.iterations,
            launched_unix=run.launched_unix,
            scale=Scale(
                tokens_per_sample=plan.model.tokens or 0, price_per_hour=price, log_interval=plan.train.log_interval
            ),
        )


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Parameter]]:
    for key, part in value.items():
        if isinstance(part, Mapping) and part:
            yield from _flat(part, f"{prefix}{key}.")
        elif isinstance(part, bool | int | float):
            yield f"{prefix}{key}", part
        else:
            yield f"{prefix}{key}", str(part) if isinstance(part, str) else json.dumps(part)


def _text(path: Path) -> str:
    try:
        return read_text(path, errors="replace")
    except (FileNotFoundError, TdppError):
        return ""


def _known(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


OFFLINE = ("offline", "disabled", "dryrun")
"""Values of WANDB_MODE that need no account."""
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def require_ready(kinds: Sequence[Tracker], environment: Mapping[str, str], given_by: str = "log={}") -> None:
    """Raises LaunchError for a library that is not installed, or an account that nobody has logged in to.

    Args:
        environment: that the trackers' libraries will see.
        given_by: how the user asked for a tracker, with {} in the place of its name.
    """
    for kind in dict.fromkeys(kinds):
        asked = given_by.format(kind)
        if lacking := [name for name in _packages(kind, environment) if find_spec(name) is None]:
            raise LaunchError(
                f"{asked}: {', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed here; install "
                f"all trackers with pip install 'tdpp[trackers]', or leave it out"
            )
        if kind is Tracker.wandb and not _has_account(environment):
            raise LaunchError(
                f"{asked}: not logged in to Weights & Biases here; run 'wandb login', or export WANDB_API_KEY, or "
                f"export WANDB_MODE=offline to keep everything in the run's folder for 'wandb sync'"
            )


def _packages(kind: Tracker, environment: Mapping[str, str]) -> list[str]:
    if kind is not Tracker.mlflow:
        return [str(kind)]
    in_database = urlsplit(environment.get("MLFLOW_TRACKING_URI") or "sqlite:").scheme.startswith("sqlite")
    return ["mlflow", *(["sqlalchemy", "alembic"] if in_database else [])]


def _has_account(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_MODE", "").lower() in OFFLINE or any(environment.get(key) for key in _KEYS):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = Path(environment.get("NETRC") or Path.home() / ".netrc")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
