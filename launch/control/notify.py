"""Telling somebody that a run has ended: by a command, and by a POST to an address. Once for every end.

Whoever sees the end first tells it: the agent of the last node (`launch.on_end`), which lives on when the login session
is gone; or whoever follows or stops the run, where agents were killed. A file that only one of them can make decides.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError

from conf.errors import TdppError
from conf.run_folder.json_values import typed
from conf.run_folder.run_files import parse_json
from conf.run_folder.rundir import RunDir
from conf.visible import visible
from launch.files.locks import owner_of
from launch.files.own_path import own_folder
from launch.judge.state import State
from launch.judge.verdict import decide
from launch.machine.processes import OF_A_RUN
from launch.observe.look import observe

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment  # whoever looks at a run need not import the schema

SCHEMES = ("https://", "http://")
"""How an address begins that a webhook may have."""
POST_S = 10.0
COMMAND_S = 30.0
"""So long a command may take. Of a Slurm job nothing outlives the node's agent, which waits for it."""
_UNDECIDED = (State.starting, State.running, State.failing, State.unknown)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """notify.json."""

    command: tuple[str, ...]
    webhook: str | None
    """Name of the variable that holds the address."""


def settings_of(experiment: Experiment) -> dict[str, Any] | None:
    """What a run keeps for its end; None where nobody is to be told."""
    notify = experiment.notify
    if notify.command is None and notify.webhook is None:
        return None
    return {"command": list(notify.words), "webhook": notify.webhook}


def notify_end(run: RunDir, environment: Mapping[str, str] = os.environ) -> None:
    """Tells that a run has ended, if it has, somebody is to be told, and nobody has done so. What goes wrong is said on
    stderr, and in the file `notified-<start>.json`; it changes no verdict.

    Raises:
        TdppError: the run's files are damaged, or others could have written what is to be run.
    """
    if not run.notify.is_file() or owner_of(run) != os.geteuid():
        return
    settings = settings_in(run)
    seen = observe(run)
    verdict = decide(seen)
    if not seen.over or verdict.state in _UNDECIDED:
        return
    notice = Notice(run, str(verdict.state), verdict.rule, verdict.reason, verdict.exit_code)
    send_once(run.notified(str(seen.start)), {"state": verdict.state}, settings, notice, environment)


def settings_in(run: RunDir) -> Settings:
    """Returns who is to be told. Raises TdppError if others could have written that, or it is damaged."""
    with own_folder(run.path, run.submitit.name, group=True) as own:  # what a group may write says nothing here
        content = parse_json(own.read(run.notify.name).decode(errors="replace"), str(run.notify))
        return typed(Settings, content, str(run.notify))


@dataclass(frozen=True)
class Notice:
    """What is told of a run."""

    run: RunDir
    state: str
    rule: str
    reason: str
    exit_code: int | None
    """None while it goes on: then the rule is an alarm's."""

    @property
    def alarm(self) -> str:
        return self.rule if self.exit_code is None else ""


def send_once(
    noted: Path, content: Mapping[str, str], settings: Settings, notice: Notice, environment: Mapping[str, str]
) -> None:
    """Tells it unless `noted` is there, which then has the content and what went wrong; that is said on stderr, too."""
    try:
        os.close(os.open(noted, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return
    failures = send(settings, notice, environment)
    notice.run.write_json(noted, {"unix": time.time(), **content, "failures": failures})
    for failure in failures:
        print(visible(f"{notice.run.name}: {failure}"), file=sys.stderr, flush=True)


def send(settings: Settings, notice: Notice, environment: Mapping[str, str]) -> list[str]:
    """Tells it in all ways that are set; returns what went wrong."""
    return [*_commanded(settings, notice, environment), *_posted(settings, notice, environment)]


def _commanded(settings: Settings, notice: Notice, environment: Mapping[str, str]) -> list[str]:
    """Runs the command; returns what went wrong."""
    if not settings.command:
        return []
    about = {
        "TDPP_RUN": notice.run.name,
        "TDPP_RUN_PATH": str(notice.run.path),
        "TDPP_STATE": notice.state,
        "TDPP_REASON": notice.reason.replace("\0", " "),
        "TDPP_EXIT_CODE": "" if notice.exit_code is None else str(notice.exit_code),
        "TDPP_ALARM": notice.alarm,
    }
    inherited = {name: value for name, value in environment.items() if name not in OF_A_RUN}
    what = f"notify.command ({settings.command[0]})"
    # A pipe would stay open, and be waited for, as long as anything lives that the command left in the background.
    with tempfile.TemporaryFile() as stderr:
        try:
            done = subprocess.run(
                settings.command,
                env=inherited | about,
                cwd=notice.run.path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                timeout=COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [f"{what} took more than {COMMAND_S:g} s and was killed"]
        except OSError as error:
            return [f"{what} could not be started: {error.strerror}"]
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines()
    return [f"{what} exited with {done.returncode}: {lines[-1] if lines else 'no message'}"] if done.returncode else []


def _posted(settings: Settings, notice: Notice, environment: Mapping[str, str]) -> list[str]:
    """Sends the notice; returns what went wrong, in words without the address, which is a secret."""
    if settings.webhook is None:
        return []
    what = f"notify.webhook={settings.webhook}"
    address = environment.get(settings.webhook, "")
    if not address.startswith(SCHEMES):
        return [f"{what}: the variable must hold an address that begins with {' or '.join(SCHEMES)}"]
    silent = f"the server did not answer within {POST_S:g} s"
    text = f"{notice.run.name}: {f'alarm: {notice.alarm}' if notice.alarm else notice.state}, {notice.reason}"
    content = {
        "text": text,  # Slack and Mattermost show this, Discord the other one
        "content": text,
        "run": notice.run.name,
        "path": str(notice.run.path),
        "state": notice.state,
        "rule": notice.rule,
        "reason": notice.reason,
        "exit_code": notice.exit_code,
        "alarm": notice.alarm,
    }
    try:
        request = urllib.request.Request(
            address, json.dumps(content).encode(), {"Content-Type": "application/json", "User-Agent": "tdpp"}
        )
        with urllib.request.build_opener(_NoRedirection).open(request, timeout=POST_S):
            return []
    except HTTPError as error:
        if 300 <= error.code < 400:
            return [
                f"{what}: the server answered {error.code}, a redirection, which is not followed; store the address "
                f"to which it leads in the variable"
            ]
        return [f"{what}: the server answered {error.code}"]
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            return [f"{what}: {silent}"]
        return [f"{what}: the server could not be reached: {getattr(error.reason, 'strerror', None) or 'no answer'}"]
    except TimeoutError:
        return [f"{what}: {silent}"]
    except (OSError, ValueError, http.client.HTTPException) as error:
        return [f"{what}: {type(error).__name__}"]


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Refuses redirections: urllib would send a GET without the verdict, and take a login page for an answer."""

    def redirect_request(self, *_: object) -> None:
        return None


def notify_end_if_possible(run: RunDir) -> None:
    """The same at the end of a command, whose own answer does not depend on it."""
    try:
        notify_end(run)
    except (TdppError, OSError) as error:
        print(visible(f"{run.name}: its end could not be reported: {error}"), file=sys.stderr, flush=True)
