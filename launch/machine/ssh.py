"""Calls a command of tdpp on a host by the system's ssh: the only module that calls it.

All that says how a host is reached (user, port, key, jump host) is in the user's ~/.ssh/config. Nobody is ever asked
for anything, and a host whose key is not known is not trusted. What is handed over goes through ssh's stdin, so that no
command line holds it.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from launch.errors import LaunchError
from launch.machine.processes import captured
from launch.machine.provenance import PROJECT

OPTIONS = ("-T", "-x", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=15")
MODULE = "launch.on_host"
MARK = "tdpp-answer: "
"""Before the answer: a user's shell may print something first."""
ANSWER_S = 60.0
NO_PROJECT, NO_PYTHON = 90, 91
_OF_SSH = 255
_SCRIPT = (
    f'cd "$1" 2>/dev/null && test -f launch/on_host.py || exit {NO_PROJECT}; '
    f'command -v "$2" >/dev/null || exit {NO_PYTHON}; exec "$2" -m "$3" "$4"'
)


def command(host: str, verb: str) -> list[str]:
    """The whole command line that does a `verb` of `launch.on_host` on a host."""
    there = shlex.join(["sh", "-c", _SCRIPT, "sh", str(PROJECT), sys.executable, MODULE, verb])
    return ["ssh", *OPTIONS, "--", host, there]


def call(host: str, verb: str, given: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """What `launch.on_host` answers on a host. Raises LaunchError: the host cannot be reached, does not have what it
    needs, or says what is wrong."""
    try:
        done = captured(command(host, verb), timeout_s, given=json.dumps(given))
    except FileNotFoundError as error:
        raise LaunchError(
            "executor.kind=hosts: ssh is not on this machine's PATH; install the OpenSSH client"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"executor.hosts: {host} did not answer within {timeout_s:g} s; try 'ssh {host} true'"
        ) from error
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        raise LaunchError(f"executor.hosts: {host}{fault(host, done.returncode, done.stderr)}")
    answer: dict[str, Any] = json.loads(answers[-1])
    if "error" in answer:
        raise LaunchError(f"executor.hosts: {host}: {answer['error']}")
    return answer


def fault(host: str, code: int, stderr: str) -> str:
    """What went wrong, and the way out, behind the host's name. `said` is what came on stderr."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    if code == NO_PROJECT:
        return f" has no tdpp in {PROJECT}; every host needs it at the same path as this machine (docs/hosts.md)"
    if code == NO_PYTHON:
        return f" has no Python {sys.executable}; every host needs it at the same path as this machine (docs/hosts.md)"
    if code != _OF_SSH:
        return f": tdpp exited with {code} there: {last}"
    if "IDENTIFICATION HAS CHANGED" in stderr:
        return (
            " presents another host key than the known one: the host was reinstalled, or somebody impersonates it. "
            f"Find out which, then remove the old key (ssh-keygen -R {host}) and accept the new one (ssh {host})"
        )
    if "Host key verification failed" in stderr or "host key is known" in stderr:
        return (
            f" has a host key that ssh does not know yet: connect once (ssh {host}), compare the fingerprint and "
            f"accept it"
        )
    if "Permission denied" in stderr or "Too many authentication failures" in stderr:
        return (
            f" asks for a password, which tdpp never enters: install your key (ssh-copy-id {host}), with an agent or "
            f"without a passphrase, until 'ssh -o BatchMode=yes {host} true' works ({last})"
        )
    return f" cannot be reached by ssh: {last}; try 'ssh {host} true'"
