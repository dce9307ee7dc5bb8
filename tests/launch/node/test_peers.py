"""When a node thinks that it cannot go on, because of another node of the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from conf.run_folder.rundir import RunDir
from launch.files.records import Start
from launch.node.peers import DECISION_S, LOOK_S, SILENCE_S, Finding, JobFate, OtherJob, Peer, Peers, Sign, watched

NAMES = ["a-0", "b-0", "b-1"]
HERE = Start(0, 1)
MEET_S = 600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "nodes").mkdir()
    return RunDir(tmp_path)


def tell(run: RunDir, name: str, **changes: Any) -> None:
    state = {"state": "running", "start": str(HERE), "exit_code": None, "stopped": None, "reason": None, "pid": 1}
    state |= {"job": None, "started_unix": 0.0, "ended_unix": None, "out_begin": 0, "err_begin": 0}
    run.write_json(run.node_state(name), {**state, "beat_unix": time.monotonic(), **changes})


def peers(run: RunDir, node_rank: int = 0, job: OtherJob | None = None) -> Peers:
    return Peers(run, watched(NAMES, node_rank, [0, 1, 2]), HERE, MEET_S, lambda _name, _time: job)


@pytest.mark.parametrize(
    ("told", "sign"),
    [
        pytest.param({"state": "running"}, Sign.fine, id="at-work"),
        pytest.param({"state": "ended", "exit_code": 0}, Sign.fine, id="ended-well"),
        pytest.param(
            {"state": "ended", "exit_code": 75, "stopped": "SIGUSR2", "reason": "gave up"},
            Sign.fine,
            id="saved-for-good",
        ),
        pytest.param({"state": "requeued"}, Sign.requeued, id="saved-and-waits-to-be-started-again"),
        pytest.param({"state": "ended", "exit_code": 1}, Sign.failed, id="failed"),
        pytest.param({"state": "ended", "exit_code": -9}, Sign.failed, id="killed"),
        pytest.param({"state": "ended", "exit_code": 143, "stopped": "SIGTERM"}, Sign.cut, id="ended-from-outside"),
        pytest.param(
            {"state": "ended", "exit_code": 143, "stopped": "SIGTERM", "reason": "ended because node x failed"},
            Sign.failed,
            id="followed-a-failure",
        ),
        pytest.param({"state": "running", "start": "0.2"}, Sign.ahead, id="started-again"),
        pytest.param({"state": "starting", "start": "1.0"}, Sign.ahead, id="submitted-again"),
        pytest.param({"state": "ended", "exit_code": 1, "start": "0.0"}, Sign.absent, id="an-earlier-start-failed"),
    ],
)
def test_what_a_node_says_of_itself(run: RunDir, clock: Clock, told: dict[str, Any], sign: Sign) -> None:
    assert Peer(run, "b-0", HERE).look() is Sign.absent
    tell(run, "b-0", **told)
    assert Peer(run, "b-0", HERE).look() is sign


def test_silence_is_measured_with_our_own_clock(run: RunDir, clock: Clock) -> None:
    peer = Peer(run, "b-0", HERE)
    for beat in (5.0, 4.0, 3.0):  # their clock may go wrong
        tell(run, "b-0", beat_unix=beat)
        assert look_for(clock, peer, SILENCE_S - LOOK_S) is Sign.fine
    assert look_for(clock, peer, SILENCE_S + LOOK_S) is Sign.cut


def test_a_node_that_was_held_up_itself_takes_no_other_for_lost(run: RunDir, clock: Clock) -> None:
    """The file system that all of them share stood still."""
    peer = Peer(run, "b-0", HERE)
    tell(run, "b-0")
    assert peer.look() is Sign.fine
    clock.now += 10 * SILENCE_S
    assert peer.look() is Sign.fine


def look_for(clock: Clock, peer: Peer, seconds: float) -> Sign:
    """What is seen at last."""
    sign = peer.look()
    for _ in range(int(seconds / LOOK_S)):
        clock.now += LOOK_S
        sign = peer.look()
    return sign


@pytest.mark.parametrize(
    ("node_rank", "job", "whom"),
    [(0, [0, 1], ["b", "c", "d"]), (1, [0, 1], ["a"]), (2, [2, 3], ["a"]), (3, [2, 3], ["a", "c"])],
    ids=["node-0", "of-its-job", "first-of-another-job", "of-another-job"],
)
def test_whom_a_node_watches(node_rank: int, job: list[int], whom: list[str]) -> None:
    assert watched(["a", "b", "c", "d"], node_rank, job) == whom


def test_node_0_watches_all_and_they_watch_node_0(run: RunDir, clock: Clock) -> None:
    for name in NAMES:
        tell(run, name)
    tell(run, "b-1", state="ended", exit_code=1)
    assert peers(run, 1).look() is None
    assert peers(run, 0).look() == Finding("node b-1 failed", again=False)


def test_a_missing_node_is_waited_for_until_the_limit(run: RunDir, clock: Clock) -> None:
    tell(run, "b-0")
    found = peers(run)
    assert found.look() is None
    for _ in range(int(MEET_S // 10)):
        clock.now += 10
        tell(run, "b-0")
    finding = found.look()
    assert finding == Finding("node b-1 did not start within 10 min (executor.meet_min)", again=False)


def test_a_missing_node_whose_job_is_over_is_not_waited_for(run: RunDir, clock: Clock) -> None:
    job = OtherJob("job 7 is CANCELLED (by 0)", JobFate.over)
    assert peers(run, job=job).look() == Finding("node b-0 will not start: job 7 is CANCELLED (by 0)", again=False)


@pytest.mark.parametrize(
    ("fate", "again"), [(JobFate.waits, True), (JobFate.over, False)], ids=["will-come-back", "will-not"]
)
def test_a_node_of_another_job_that_was_cut_off_decides_by_its_job(
    run: RunDir, clock: Clock, fate: JobFate, again: bool
) -> None:
    for name in NAMES:
        tell(run, name)
    tell(run, "b-0", state="ended", exit_code=143, stopped="SIGTERM")
    finding = peers(run, job=OtherJob("job 7 is …", fate)).look()
    assert finding is not None
    assert finding.again is again


def test_until_slurm_has_decided_a_node_that_was_cut_off_is_waited_for(run: RunDir, clock: Clock) -> None:
    for name in NAMES:
        tell(run, name)
    tell(run, "b-0", state="ended", exit_code=143, stopped="SIGTERM")
    found = peers(run, job=OtherJob("job 7 is COMPLETING", JobFate.lives))
    assert found.look() is None
    clock.now += DECISION_S + LOOK_S
    tell(run, "b-1")
    finding = found.look()
    assert finding is not None
    assert not finding.again
    assert "its job still runs" in finding.reason


def test_a_node_that_came_back_is_given_as_much_time_when_it_is_silent_again(run: RunDir, clock: Clock) -> None:
    found = Peers(run, ["b-0"], HERE, MEET_S, lambda _name, _time: OtherJob("job 7 is RUNNING", JobFate.lives))
    for _ in range(2):
        tell(run, "b-0")
        for _ in range(int(SILENCE_S + DECISION_S / 2)):
            assert found.look() is None
            clock.now += LOOK_S
        assert found.undecided
    tell(run, "b-0")
    assert found.look() is None
    assert not found.undecided


def test_a_node_of_the_same_job_that_was_cut_off_is_lost_at_once(run: RunDir, clock: Clock) -> None:
    for name in NAMES:
        tell(run, name)
    tell(run, "b-0", state="ended", exit_code=143, stopped="SIGTERM")
    assert peers(run).look() == Finding("node b-0 was lost", again=False)


def test_a_job_that_was_started_again_takes_the_others_along(run: RunDir, clock: Clock) -> None:
    for name in NAMES:
        tell(run, name)
    tell(run, "b-1", state="starting", start="0.2")
    assert peers(run).look() == Finding("node b-1 was started again", again=True)


def test_a_node_that_goes_on_alone_follows_one_that_has_saved(run: RunDir, clock: Clock) -> None:
    for name in NAMES:
        tell(run, name)
    tell(run, "b-0", state="requeued")
    found = peers(run)
    assert found.look() is None
    clock.now += SILENCE_S + LOOK_S
    tell(run, "b-1")
    assert found.look() == Finding("node b-0 waits to be started again", again=True)
