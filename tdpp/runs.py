"""Runs: started, loaded, waited for, stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conf.compose import compose_unchecked
from conf.origins import origins_named
from conf.reading.values import parse_key_values
from conf.run_folder.run_folders import usual_runs_dir
from conf.run_folder.rundir import RunDir
from launch.commands.launch import OWN, partition_outcomes
from launch.commands.launching.preflight import Preflight, preflight
from launch.commands.launching.resolve_auto import resolve_auto
from launch.control import follow
from launch.control import stop as control
from launch.control.notify import notify_end_if_possible
from launch.control.submit import start
from launch.errors import LaunchError
from launch.judge.verdict import Verdict, judge
from launch.machine.provenance import read_source
from launch.node.worker_command import WORKER
from launch.sweep.start import Combination, Outcomes, confirm
from reports import notebook
from reports.readers.megatron_log import Sizes
from reports.sources import Source
from tdpp.overrides import checked

A_LOOP = "in Python, write a loop over launches"
ONLY_TYPED = {
    "-m": A_LOOP,
    "--multirun": A_LOOP,
    "--full": "tdpp.compose shows the configuration",
    "dry_run": "tdpp.compose shows the configuration",
    "resume": "continue the run in a shell, and load it here with tdpp.load",
}
"""Words of the command that mean nothing to `launch`, and what to do instead."""


class Run(notebook.Run):
    """A run: its tables and figures as they were when it was loaded, and what can be done with it now."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(Source.find(run.runs, str(run.path), Sizes()).read())
        self._run = run

    @property
    def path(self) -> Path:
        """Its folder."""
        return self._run.path

    @property
    def verdict(self) -> Verdict:
        """What `tdpp status` says at this moment: `state`, `rule`, `reason`, `evidence`, `exit_code`."""
        return judge(self._run)

    def reload(self) -> Run:
        """The same run with what it has logged by now."""
        return Run(self._run)

    def wait(self, timeout_s: float | None = None) -> Run:
        """Waits until the run is over, and loads it. An interrupt of the notebook ends the waiting, not the run. Raises
        TimeoutError: it is not over after `timeout_s` seconds."""
        if not follow.wait(self._run, timeout_s):
            raise TimeoutError(f"{self.name} is not over after {timeout_s:g} s: {self.verdict.reason}")
        return self.reload()

    def stop(self) -> Run:
        """Ends all that belongs to the run, as `tdpp stop`, and loads it. Raises TdppError: it is another user's, or
        something of it cannot be ended."""
        if not control.is_over(self._run):
            control.stop(self._run)
        notify_end_if_possible(self._run)
        return self.reload()


def load(run: str | Path | None = None, runs_dir: str | Path | None = None) -> Run:
    """A run, by whatever names one on the command line: its folder, a name, a job's id; None is the latest. Raises
    TdppError: there is no such run, or it cannot be read."""
    folder = usual_runs_dir() if runs_dir is None else Path(runs_dir)
    return Run(RunDir.find(folder, None if run is None else str(run)))


def launch(overrides: Sequence[str] = (), wait: bool = True) -> Run:
    """Starts what `tdpp launch <overrides>` starts, and waits for its end unless `wait` is false.

    A run that failed is returned as well: look at `run.verdict`.

    Raises:
        TdppError: the configuration breaks a rule, or the run cannot be started; with the message of the command line.
    """
    words = checked(overrides)
    with origins_named(parse_key_values(words, OWN, LaunchError)[1]):
        return launched(words, wait, preflight, WORKER)


def launched(overrides: Sequence[str], wait: bool, preflight: Preflight, worker: str) -> Run:
    """The same with another check of the data, and another worker."""
    own, others = parse_key_values(overrides, OWN, LaunchError)
    words = tuple(others)
    for word in words:
        if (instead := ONLY_TYPED.get(word.partition("=")[0])) is not None:
            raise LaunchError(f"{word}: only the command 'tdpp launch' takes this; {instead}")
    cfg = compose_unchecked(words)
    if "profile" in own:
        from fasop.costs.profiles.files import with_profile

        cfg, profiles = with_profile(cfg, own["profile"], words)
        words = (*words, *profiles)
    experiment, chosen = resolve_auto(cfg, words)
    outcomes: Outcomes = {}
    wanted = partition_outcomes([Combination(overrides=words, composed=experiment, chosen=chosen)], outcomes, preflight)
    if wanted:
        confirm(list(wanted.values()))
        found = Run(start(wanted[0], words, worker, read_source()))
    else:
        if (error := outcomes[0].error) is not None:
            raise error
        assert outcomes[0].run is not None, "skip_existing"
        found = Run(outcomes[0].run)
    return found.wait() if wait else found
