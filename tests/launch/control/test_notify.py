"""A run's end is told once, by real commands and to a real server, whether or not anybody is there."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.run_folder.rundir import RunDir
from launch.commands import stop as stop_command
from launch.control import notify
from launch.control.notify import notify_end
from launch.control.planning.checks import check, require_exported
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from launch.on_end import notify_alarms
from tests.support.launch.live import FOREVER, TWO_NODES, agents, start, token, wait_for, wait_until_running
from tests.support.launch.run_folders import Case

SECRET = "/".join(["T000", "secret", "B000"])
"""In pieces, since a run keeps a patch of uncommitted changes, which may show this line."""


class Hook:
    """A server on this machine, and what it was sent."""

    def __init__(self) -> None:
        self.got: list[dict[str, object]] = []
        self.answer = 200
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(hook.answer)
                self.send_header("Location", "/login")  # of a redirection
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"log in first")

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/{SECRET}"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    found = Hook()
    monkeypatch.setenv("TDPP_WEBHOOK", found.address)
    yield found
    found.server.shutdown()
    found.server.server_close()


def told(run: RunDir) -> dict[str, object]:
    """What stands in the run's folder once its end was told; no process of it is left then."""
    path = run.notified("0.0")
    wait_for(lambda: path.exists() and path.read_text())
    wait_for(lambda: not processes.find(token(run)))
    return json.loads(path.read_text())


def command(folder: Path) -> str:
    """Appends a line of what it was told; its argument holds what a shell would run."""
    script = folder / "tell.py"
    script.write_text(
        "import os, sys\n"
        f"line = [*sys.argv[1:], *(os.environ[n] for n in ('TDPP_RUN', 'TDPP_STATE', 'TDPP_EXIT_CODE'))]\n"
        f"open({str(folder / 'told')!r}, 'a').write('|'.join(line) + '\\n')\n"
    )
    return f"notify.command=\"{sys.executable} {script} '$(touch x); a b'\""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "state"),
    [
        ((), State.succeeded),
        (("+cluster.environment.FAIL_RANK='3'",), State.failed),
        (("stop",), State.stopped),
    ],
    ids=["success", "failure", "stopped"],
)
def test_every_end_is_told_once_although_nobody_follows(
    runs: Path, tmp_path: Path, hook: Hook, overrides: tuple[str, ...], state: State
) -> None:
    stops = overrides == ("stop",)
    more = FOREVER if stops else overrides
    run = start(runs, *TWO_NODES, "notify.webhook=TDPP_WEBHOOK", command(tmp_path), *more)
    if stops:
        wait_until_running(run)
        assert stop_command.main([str(run.path)]) == 0
    assert told(run) | {"unix": 0} == {"unix": 0, "state": state, "failures": []}
    notify_end(run)
    verdict = judge(run)
    assert verdict.state is state
    (sent,) = hook.got
    assert (sent["run"], sent["state"], sent["reason"]) == (run.name, state, verdict.reason)
    assert (sent["path"], sent["exit_code"]) == (str(run.path), verdict.exit_code)
    assert (tmp_path / "told").read_text() == f"$(touch x); a b|{run.name}|{state}|{verdict.exit_code}\n"


@pytest.mark.slow
def test_what_cannot_be_told_changes_no_verdict_and_shows_no_address(runs: Path, hook: Hook) -> None:
    hook.answer = 500
    run = start(runs, "notify.webhook=TDPP_WEBHOOK", "notify.command=\"sh -c 'echo no mail here >&2; exit 3'\"")
    failures = [
        "notify.command (sh) exited with 3: no mail here",
        "notify.webhook=TDPP_WEBHOOK: the server answered 500",
    ]
    assert told(run)["failures"] == failures
    assert judge(run).state is State.succeeded
    assert all(line in run.node_err("local-0").read_text() for line in failures)
    for path in (path for path in run.path.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_who_looks_after_a_run_tells_of_it_where_its_agents_were_killed(runs: Path, hook: Hook) -> None:
    run = start(runs, *FOREVER, "notify.webhook=TDPP_WEBHOOK")
    wait_until_running(run)
    for pid in agents(run):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not processes.find(token(run)))
    assert hook.got == []
    assert stop_command.main([str(run.path)]) == 0
    assert stop_command.main([str(run.path)]) == 0
    assert [sent["state"] for sent in hook.got] == [judge(run).state] == [State.lost]


def ended(runs: Path, command: list[str], webhook: str | None) -> RunDir:
    """A run that nobody has told of."""
    run = Case().make(runs / "tiny" / "20260101-000000-a")
    run.submitit.mkdir(exist_ok=True)
    run.write_json(run.notify, {"command": command, "webhook": webhook})
    return run


def failures(run: RunDir) -> list[str]:
    notify_end(run)
    (path,) = run.path.glob("notified-*.json")
    return json.loads(path.read_text())["failures"]


@pytest.mark.parametrize("answer", [301, 302, 303, 307, 308])
def test_a_redirection_is_no_success(runs: Path, hook: Hook, answer: int) -> None:
    hook.answer = answer
    (failure,) = failures(ended(runs, [], "TDPP_WEBHOOK"))
    assert f"notify.webhook=TDPP_WEBHOOK: the server answered {answer}, a redirection" in failure
    assert "/login" not in failure  # it may be as secret as the first address


def test_a_server_that_nobody_runs_is_named_by_its_variable(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{port}/{SECRET}")
    (failure,) = failures(ended(runs, [], "HOOK"))
    assert failure == "notify.webhook=HOOK: the server could not be reached: Connection refused"


def test_a_server_that_does_not_answer_is_left(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "POST_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.getsockname()[1]}/{SECRET}")
        (failure,) = failures(ended(runs, [], "HOOK"))
    assert failure == "notify.webhook=HOOK: the server did not answer within 0.2 s"


def test_what_a_command_leaves_in_the_background_is_not_waited_for(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "COMMAND_S", 20)
    script = f"sleep 60 & echo $! > {tmp_path}/pid"  # with the command's stderr
    assert failures(ended(runs, ["sh", "-c", script], None)) == []
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_an_alarm_is_told_once_while_the_run_goes_on(runs: Path, tmp_path: Path, hook: Hook) -> None:
    script = 'echo "$TDPP_STATE|$TDPP_ALARM|$TDPP_EXIT_CODE|$TDPP_REASON" >> "$0"'
    run = ended(runs, ["sh", "-c", script, str(tmp_path / "told")], "TDPP_WEBHOOK")
    losses = [4.0 + 0.01 * (number % 7) for number in range(110)]
    lines = [
        {"iteration": n, "unix": 1e9 + n, "elapsed_ms": 10.0, "loss": loss, "nan": 0} for n, loss in enumerate(losses)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    notify_alarms(run)
    assert not (tmp_path / "told").exists()
    with run.metrics.open("a") as file:
        file.write(
            json.dumps({"iteration": 110, "unix": 1e9 + 110, "elapsed_ms": 10.0, "loss": 9.0, "nan": 0}) + "\ncut of"
        )
    notify_alarms(run)
    notify_alarms(run)
    said = "the loss jumped to 9 at iteration 110, from 4.03 in the lines before"
    assert (tmp_path / "told").read_text() == f"running|loss-spike||{said}\n"
    (sent,) = hook.got
    assert (sent["state"], sent["alarm"], sent["reason"], sent["exit_code"]) == ("running", "loss-spike", said, None)
    assert json.loads((run.path / "alarm-loss-spike.json").read_text())["failures"] == []


def test_late_data_are_told_by_the_files_of_the_ranks(runs: Path, tmp_path: Path, hook: Hook) -> None:
    """Also where the files are much longer than what is read of them."""
    run = ended(runs, ["sh", "-c", 'echo "$TDPP_ALARM $TDPP_REASON" >> "$0"', str(tmp_path / "told")], "TDPP_WEBHOOK")
    minutes = range(1, 6000)
    lines = [{"iteration": n, "unix": 1e9 + 60 * n, "elapsed_ms": 100.0, "loss": 4.0, "nan": 0} for n in minutes]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rank = run.read_plan().nodes[1].ranks[0]
    run.rank_waits(rank).parent.mkdir(exist_ok=True)
    waits = [{"iteration": n, "unix": 1e9 + 60 * n, "wait_ms": 2.0 + n % 2 + 20.0 * (n > 5900)} for n in minutes]
    run.rank_waits(rank).write_text("".join(json.dumps(line) + "\n" for line in waits) + "cut of")
    notify_alarms(run)
    notify_alarms(run)
    name = run.read_plan().nodes[1].name
    (told,) = (tmp_path / "told").read_text().splitlines()
    assert told.startswith(f"late-data rank {rank} on {name} waited 22.")
    assert "(22% of an iteration)" in told or "(23% of an iteration)" in told


def test_nobody_else_than_its_owner_runs_a_command(tmp_path: Path, runs: Path, hook: Hook) -> None:
    run = RunDir(runs / "a" / "b")
    run.submitit.mkdir(parents=True)
    run.submitit.chmod(0o777)
    run.write_json(run.notify, {"command": ["touch", str(tmp_path / "ran")], "webhook": None})
    with pytest.raises(LaunchError, match="others"):
        notify_end(run)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (f"notify.webhook=https://x.example/{SECRET}", "notify.webhook takes the name of a variable"),
        ('notify.command="a \'b"', 'notify.command="a \'b" cannot be read'),
        ("notify.command=''", "is empty"),
        ("notify.command='./ended.sh now'", "./ended.sh is a relative path, but the program is started in the run's"),
        ("notify=x", "notify=x: must be a group of keys, not 'x'"),
        ("notify.command=[sh,x]", "notify.command=[sh,x]: must be a string; put a string with brackets"),
        ("notify.mail=me", "notify.mail='me' must be an address"),
        (
            "notify.mail=me@example.org",
            "notify.mail=me@example.org needs Slurm, which sends the mail, but executor.kind=local",
        ),
    ],
)
def test_what_can_tell_nobody_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([word])
    assert message in str(error.value)
    assert SECRET not in str(error.value)


def test_several_addresses_are_written_as_the_message_says() -> None:
    with pytest.raises(ConfigError) as error:
        compose(["notify.mail=me", "executor=slurm"])
    (word,) = re.findall(r"'(notify\.mail=\".*\")'", str(error.value))
    assert compose([word, "executor=slurm"]).notify.mail == "me@example.org,you@example.org"


def test_a_variable_that_is_not_exported_is_named() -> None:
    with pytest.raises(LaunchError, match="HOOK is not set in this shell"):
        require_exported(compose(["notify.webhook=HOOK"]), {})


def test_a_variable_without_an_address_is_named_before_the_run() -> None:
    with pytest.raises(LaunchError, match="HOOK: the variable must hold an address that begins with https:// or") as e:
        require_exported(compose(["notify.webhook=HOOK"]), {"HOOK": SECRET})
    assert SECRET not in str(e.value)
    require_exported(compose(["notify.webhook=HOOK"]), {"HOOK": f"https://x/{SECRET}"})


def test_a_program_that_is_not_here_is_named_before_the_run() -> None:
    with pytest.raises(LaunchError, match=r"notify\.command=nosuch a: no program nosuch that can be executed;"):
        check(compose(["notify.command='nosuch a'"]))
    check(compose(["notify.command='sh -c true'"]))
