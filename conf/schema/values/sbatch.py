"""Options of sbatch beside those that have keys of their own, as a site or a user wants them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from conf.errors import ConfigError

Options = Mapping[str, str | None]
"""Values by the long names of options. An empty text gives an option without a value; null takes back that of all
groups."""
KEYS = {
    "partition": "partition",
    "gres": "gres",
    "cpus-per-task": "cpus_per_task",
    "mem": "mem",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "time": "time_min",
}
"""The keys of a group that give an option each."""
_NODES = "the plan says how many nodes and ranks there are"
_FILES = "everything that a job writes goes to the run's folder"
_RESTARTS = "whether and when a job is started again follows from executor.save_s and executor.max_requeues"
_FOUND = "tdpp finds the run's jobs by their ids in one queue"
REASONS = {
    "nodes": _NODES,
    "ntasks": _NODES,
    "array": "a run is one job for each group; 'tdpp launch -m' starts several runs",
    "hetjob": "executor.het=hetjob asks for it",
    "job-name": "it is the run's name: name=…",
    "output": _FILES,
    "error": _FILES,
    "open-mode": _FILES,
    "signal": _RESTARTS,
    "requeue": _RESTARTS,
    "no-requeue": _RESTARTS,
    "no-kill": "elastic.enabled=true keeps the nodes that are left",
    "dependency": "the jobs of a run wait for each other; executor.after=RUN waits for another run",
    "kill-on-invalid-dep": "the jobs of a run wait for each other",
    "mail-user": "notify.mail gives it",
    "mail-type": "notify.mail gives it",
    "export": "cluster.environment and cluster.environment_from give variables to the ranks",
    "export-file": "cluster.environment and cluster.environment_from give variables to the ranks",
    "get-user-env": "cluster.environment and cluster.environment_from give variables to the ranks",
    "clusters": _FOUND,
    "parsable": _FOUND,
    "quiet": _FOUND,
    "test-only": "dry_run=true shows what would be submitted",
    "wait": "executor.wait and 'tdpp status --watch' wait for a run",
    "wrap": "tdpp writes the job's script",
}
"""Why what tdpp gives to sbatch itself cannot be given."""
EXCLUDE = "exclude"


def check(key: str, options: Options) -> None:
    """Raises ConfigError for an option that cannot be given, or not like that; `key` holds them."""
    for name, value in options.items():
        abbreviated = [one for one in (*KEYS, *REASONS) if one != name and one.startswith(name)]
        known = name in KEYS or name in REASONS
        if not re.fullmatch(r"[a-z][a-z0-9]+(-[a-z0-9]+)*", name) or (abbreviated and not known):
            raise ConfigError(
                f"{key}: {name!r} is not the long name of an option of sbatch; give it in full and without the leading "
                "dashes, such as reservation or mem-per-cpu"
            )
        if name in KEYS:
            raise ConfigError(f"{key}.{name}: this option has a key of its own: cluster.groups.NAME.{KEYS[name]}")
        if reason := REASONS.get("ntasks" if name.startswith("ntasks") else name):
            raise ConfigError(f"{key}.{name}: tdpp decides on --{name} itself: {reason}; leave it out")
        if value:
            check_text(f"{key}.{name}", value)


def check_text(key: str, value: str) -> None:
    """Raises ConfigError for a text that cannot be an option's value.

    Slurm reads a submission script line by line: what follows a line break would be a command of the shell.
    """
    if not (value.strip() and value.isprintable()):
        raise ConfigError(
            f"{key}={value!r} cannot be an option of Slurm: it is empty or contains a line break or another control "
            f"character; use null to leave the option out"
        )


def check_hosts(key: str, hosts: Sequence[str]) -> None:
    """Raises ConfigError for a text that names no node, or several as Slurm writes them."""
    for host in hosts:
        if not names_nodes(host):
            raise ConfigError(f"{key}: {host!r} is not a node; write names such as gpu07, or '\"gpu[03-05]\"'")


def names_nodes(text: str) -> bool:
    """Whether it may be the name of a node, or of several as Slurm writes them, such as gpu[03-05,07]."""
    return re.fullmatch(r"[\w.-]+(\[\d+(-\d+)?(,\d+(-\d+)?)*\][\w.-]*)*", text) is not None


def merged(of_all: Options, of_group: Options, exclude: Sequence[str]) -> dict[str, str]:
    """Returns the options of a group's job: its own override those of all groups; `exclude` adds excluded nodes."""
    found = {name: value for name, value in {**of_all, **of_group}.items() if value is not None}
    left_out = list(dict.fromkeys([*filter(None, [found.get(EXCLUDE)]), *exclude]))
    return found | ({EXCLUDE: ",".join(left_out)} if left_out else {})
