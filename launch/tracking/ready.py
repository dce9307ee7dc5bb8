"""Whether the trackers that a run names can be written to, as far as that is known before it starts."""

from __future__ import annotations

import netrc
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from conf.schema.trackers import Tracker
from launch.errors import LaunchError

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
