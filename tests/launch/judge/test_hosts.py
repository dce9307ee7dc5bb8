"""Real hosts stand beside the plan's nodes, a silent agent is noticed at once, and a restart says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.files.records import Start
from launch.files.run_files import read_run_files
from launch.judge.findings import findings
from launch.judge.state import State
from launch.judge.status_text import as_json, as_text, more_cells
from launch.judge.verdict import decide
from launch.machine import slurm_commands
from launch.machine.job_states import JobState, compressed, expanded, parse_starts
from launch.node.run_notices import note_requeue, note_restart, why
from launch.observe.look import finish_observation
from launch.observe.observation import Observation
from megatron_ext.contract.errors import reason_of
from tests.support.launch.run_folders import NOW, Case, Error, Node, ended

HOSTS = ("gpu2-001", "gpu2-002")
GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.231.1.13]:23773. This is typically caused by a remote worker crashing. Check the logs of the remote worker "
    "before reporting an error. GLHF! 🏖️"
)
LOST = Error(0, NOW - 13, "PeerLost", "gradients from rank 2 failed: Connection closed by peer", symptom=True)


def run_of(folder: Path, case: Case, *, silent_s: float = 0.0, start: str = "0.0") -> Path:
    """Nodes local-0 and local-1 of a Slurm job on `HOSTS`, of which the second last wrote so long ago."""
    run = case.make(folder)
    job = {"id": "11", "role": "job", "nodes": [0, 1]}
    run.write_json(run.jobs, {"token": "t", "executor": "slurm", "submission": 0, "jobs": [job]})
    for node, host in zip(run.read_plan().node_names, HOSTS, strict=True):
        if (record := run.read_json(run.node_state(node))) is not None:
            beat = NOW - silent_s if node == "local-1" else record["beat_unix"]
            run.write_json(run.node_state(node), record | {"host": host, "beat_unix": beat, "start": start})
    return folder


def seen_of(folder: Path, state: str = "RUNNING") -> Observation:
    answers = {"11": JobState(id="11", state=state, hosts=HOSTS if state == "RUNNING" else ())}
    return finish_observation(read_run_files(RunDir(folder)), answers, NOW)


def test_hosts_stand_beside_nodes_in_the_verdict_its_evidence_the_json_and_the_list(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "runs" / "x" / "20260101-000000-a", Case([ended(0), ended(1)], last=20))
    seen = seen_of(folder)
    found = findings(RunDir(folder), seen)
    assert found.verdict.reason.startswith("the worker of node local-1 on gpu2-002 exited with 1")
    assert "\n  node local-0 on gpu2-001: exited with 0" in as_text(found)
    assert [node["host"] for node in as_json(found)["nodes"]] == [*HOSTS]
    assert more_cells(seen)[-1] == "gpu2-[001-002]"


def test_ranks_are_named_with_their_host_and_what_names_it_already_is_left(tmp_path: Path) -> None:
    error = Error(2, NOW - 5, "RuntimeError", "node local-1 on gpu2-002 is odd")
    verdict = decide(seen_of(run_of(tmp_path / "run", Case([ended(1), ended(1)], [error], last=20))))
    place = "rank 2 (stage 1, dp 0, tp 0, node local-1 on gpu2-002)"
    assert verdict.reason.startswith(f"{place} failed with RuntimeError: node local-1 on gpu2-002 is odd")


def test_nodes_that_have_not_written_yet_are_named_by_the_hosts_of_their_job(tmp_path: Path) -> None:
    evidence = decide(seen_of(run_of(tmp_path / "run", Case([Node(), None])))).evidence
    assert "node local-1 on gpu2-002: not started" in evidence


@pytest.mark.parametrize(
    ("silent_s", "errors", "logged_s", "state", "said"),
    [
        (5, [], 5, State.running, ""),
        (12, [], 12, State.running, "the agent of node local-1 on gpu2-002 has been silent for 12 s"),
        (67, [], 67, State.failing, "the agent of node local-1 on gpu2-002 has been silent for 67 s"),
        (13, [LOST], 13, State.failing, "the agent of node local-1 on gpu2-002 has been silent for 13 s; rank 0 ("),
        (67, [], 3, State.running, ""),
    ],
    ids=["usual", "noted", "may be lost", "and a rank lost another", "a clock that is wrong"],
)
def test_an_agent_that_is_silent_is_named_at_once(
    tmp_path: Path, silent_s: float, errors: list[Error], logged_s: float, state: State, said: str
) -> None:
    case = Case([Node(), Node()], errors, last=20, age=logged_s)
    verdict = decide(seen_of(run_of(tmp_path / "run", case, silent_s=silent_s)))
    assert verdict.state is state, verdict
    assert said in verdict.reason
    assert ("silent" in verdict.reason) == bool(said)
    noted = f"node local-1 on gpu2-002: running, but its agent has been silent for {silent_s:g} s"
    assert (noted in verdict.evidence) == bool(said)


def test_a_run_that_waits_for_slurm_to_start_it_again_does_not_stall(tmp_path: Path) -> None:
    case = Case([Node(), Node()], last=20, age=500)
    verdict = decide(seen_of(run_of(tmp_path / "run", case, silent_s=500), "PENDING"))
    assert (verdict.state, verdict.rule) == (State.starting, "restarting"), verdict


def test_a_restart_says_when_and_why(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", Case([Node(), Node()], last=20), start="0.1")
    run = RunDir(folder)
    run.write_json(run.restarted("0.1"), {"unix": NOW - 60, "reason": "gpu2-002 failed, NODE_FAIL"})
    (line,) = [line for line in decide(seen_of(folder)).evidence if line.startswith("restarted")]
    assert ": gpu2-002 failed, NODE_FAIL; start 0.1 (submission.restart); " in line


def test_a_run_that_waits_to_be_started_again_says_why_its_agent_asked(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", Case([Node(), Node()], last=20))
    note_requeue(RunDir(folder), Start(0, 1), "node local-1 waits to be started again")
    note_requeue(RunDir(folder), Start(0, 1), "what another agent found later")
    verdict = decide(seen_of(folder, "PENDING"))
    why = "because node local-1 on gpu2-002 waits to be started again: job 11 is PENDING"
    assert f"waiting to be started again (restart 1), {why}" in verdict.reason


def test_a_run_whose_agent_wrote_nothing_says_why_by_slurms_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = "11|NODE_FAIL|gpu2-[001-002]|2026-11-26T13:51:43\n11|PENDING|None assigned|Unknown\n"
    monkeypatch.setattr(slurm_commands, "ended_starts", lambda *_: parse_starts(ended))
    monkeypatch.setattr(slurm_commands, "nodes", lambda: "")
    folder = run_of(tmp_path / "run", Case([Node(), Node()], last=20))
    verdict = decide(seen_of(folder, "PENDING"))
    assert "(restart 1), because one of gpu2-[001-002] failed, NODE_FAIL: job 11 is PENDING" in verdict.reason
    assert any(line.startswith("waits to be restarted: one of gpu2-[001-002] failed") for line in verdict.evidence)


@pytest.mark.parametrize(
    ("sacct", "kept"),
    [("11|REQUEUED|gpu2-001|2026-11-26T13:51:43\n", True), ("11|NODE_FAIL|a|2026-11-26T13:51:43\n", False)],
    ids=["requeued by the agent", "a host failed"],
)
def test_what_the_agent_wrote_stays_unless_a_host_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sacct: str, kept: bool
) -> None:
    monkeypatch.setattr(slurm_commands, "ended_starts", lambda *_: parse_starts(sacct))
    monkeypatch.setattr(slurm_commands, "nodes", lambda: "")
    run = RunDir(run_of(tmp_path / "run", Case([Node(), Node()], last=20)))
    note_requeue(run, Start(0, 1), "its time ran out")
    note_restart(run, Start(0, 1), 2, "11").join()
    assert (run.read_json(run.restarted("0.1"))["reason"] == "its time ran out") == kept


SACCT = """11|NODE_FAIL|gpu2-[001-003]|2026-11-26T13:51:43
12|REQUEUED|hgx-001|2026-11-26T13:51:45
11|RUNNING|gpu2-[003-005]|Unknown
"""


@pytest.mark.parametrize(
    ("sacct", "down", "reason"),
    [
        (SACCT, ["gpu2-002"], "gpu2-002 failed, NODE_FAIL"),
        (SACCT, [], "one of gpu2-[001-003] failed, NODE_FAIL"),
        (SACCT.replace("REQUEUED", "NODE_FAIL"), ["hgx-001"], "hgx-001 failed, NODE_FAIL"),
        ("11|NODE_FAIL|a|2026-11-26T13:00:00\n12|NODE_FAIL|b|2026-11-26T13:00:00\n", [], "one of "),
        (SACCT.replace("NODE_FAIL", "BOOT_FAIL"), ["gpu2-001"], "gpu2-001 did not boot, BOOT_FAIL"),
        (SACCT.replace("NODE_FAIL", "PREEMPTED"), [], "job 11 made room for another job, PREEMPTED"),
        (SACCT.replace("NODE_FAIL", "CANCELLED by 0"), [], "job 11 ended, CANCELLED"),
        ("11|NODE_FAIL|a|2026-11-26T13:00:00\n11|TIMEOUT|b|2026-11-26T14:00:00\n", [], "job 11 had reached its time"),
        ("11|RUNNING|gpu2-001|Unknown\n", [], None),
    ],
    ids=[
        "a host that is down",
        "back by now",
        "all components",
        "of two",
        "boot",
        "preempted",
        "other",
        "the last start counts",
        "none ended",
    ],
)
def test_why_slurm_started_a_run_again(sacct: str, down: list[str], reason: str | None) -> None:
    found = why(parse_starts(sacct), lambda hosts: [host for host in hosts if host in down])
    if reason is None or found is None:
        assert reason is found is None
        return
    assert found.reason.startswith(reason)
    assert found.hosts == tuple(down)


def test_of_gloos_messages_what_happened_is_left() -> None:
    assert reason_of(RuntimeError(GLOO)) == "Connection closed by peer [10.231.1.13]:23773"
    read = GLOO.replace("Connection closed by peer [10.231.1.13]:23773.", "Read error [10.231.1.13]:5: reset.")
    assert reason_of(RuntimeError(read)) == "Read error [10.231.1.13]:5: reset"
    assert reason_of(RuntimeError("[1, 2] is not the shape [3]")) == "[1, 2] is not the shape [3]"


@pytest.mark.parametrize(
    ("hosts", "written"),
    [
        (["gpu2-003", "gpu2-001", "gpu2-002", "gpu2-001"], "gpu2-[001-003]"),
        (["a1", "a3", "b", "a10"], "a[1,3],a10,b"),
        (["10.0.0.7"], "10.0.0.7"),
        ([], ""),
    ],
    ids=str,
)
def test_many_hosts_take_little_room(hosts: list[str], written: str) -> None:
    assert compressed(hosts) == written
    assert set(expanded(written)) == set(hosts)
