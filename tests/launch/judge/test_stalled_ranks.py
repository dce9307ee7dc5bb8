"""Which rank is blamed when a run stands still: the one that does not wait, on run folders made for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.judge.state import State
from launch.judge.verdict import Verdict, judge
from tests.support.launch.run_folders import NOW, Case, Error, Node, ended

LOST = NOW - 20
"""When the first rank gave up; train.comm_timeout_s is 60."""


@dataclass
class Does:
    """An entry of nodes/<node>.ranks.json, by default of a rank that waits."""

    does: str = "waits"
    since: float = LOST - 60
    process: str = "S"
    what: str = "activations from rank 0"
    iteration: int = 7


@dataclass
class Still(Case):
    """A run of two nodes with two ranks each, of which rank 1 of the first node gave up."""

    ranks: dict[int, Does] = field(default_factory=dict)
    """Those of which it was known what they did, by rank."""

    def make(self, path: Path) -> RunDir:
        run = super().make(path)
        for node in run.read_json(run.plan)["nodes"]:
            entries = [
                {"rank": rank, "pid": 100 + rank, "exit_code": 1, "ended_unix": NOW, "doing": self._doing(rank)}
                for rank in node["ranks"]
            ]
            run.write_json(run.node_ranks(node["name"]), entries)
        return run

    def _doing(self, rank: int) -> dict[str, object] | None:
        if rank not in self.ranks:
            return None
        does = self.ranks[rank]
        return {
            "does": does.does,
            "what": does.what,
            "iteration": does.iteration,
            "since_unix": does.since,
            "process": does.process,
        }


def gave_up(rank: int = 1, unix: float = LOST) -> Error:
    return Error(rank, unix, "PeerLost", "activations from rank 0 failed: timed out", symptom=True)


FOLLOWED = Node("ended", 143, "SIGTERM", NOW - 4, ended=NOW - 3, reason="ended because node local-0 failed")
ENDED: list[Node | None] = [ended(1), FOLLOWED]
AT_WORK = Does("works", LOST - 58)

CASES = {
    "a-stopped-one": (
        Still(ENDED, [gave_up()], ranks={0: Does(), 2: Does(process="T"), 3: Does()}),
        "rank 2 (stage 1, dp 0, tp 0, node local-1) stood still: its process 102 was stopped by SIGSTOP or Ctrl-Z "
        "(iteration 7, in: activations from rank 0)",
    ),
    "one-that-a-debugger-holds-at-work": (
        Still(ENDED, [gave_up()], ranks={0: Does(), 2: Does("works", process="t", iteration=0, what="")}),
        "rank 2 (stage 1, dp 0, tp 0, node local-1) stood still: its process 102 is held by a debugger "
        "(before the first iteration)",
    ),
    "one-that-sleeps-at-work-of-its-own": (
        Still(ENDED, [gave_up()], ranks={0: AT_WORK, 2: Does(), 3: Does()}),
        "rank 0 (stage 0, dp 0, tp 0, node local-0) stood still: computing for 58 s "
        "(iteration 7, after: activations from rank 0); its process 100 sleeps",
    ),
    "a-stopped-one-before-one-at-work": (
        Still(ENDED, [gave_up()], ranks={0: AT_WORK, 3: Does("works", LOST - 50, process="T")}),
        "rank 3 (stage 1, dp 1, tp 0, node local-1) stood still: its process 103 was stopped",
    ),
    "several-the-longest-first": (
        Still(ENDED, [gave_up()], ranks={0: Does("works", LOST - 40, "R"), 2: AT_WORK, 3: Does()}),
        "rank 2 (stage 1, dp 0, tp 0, node local-1) stood still: computing for 58 s",
    ),
    "none-that-was-at-work-for-a-moment-only": (
        Still(ENDED, [gave_up()], ranks={0: Does("works", LOST - 2), 2: Does(), 3: Does("works", LOST + 1)}),
        "node local-1 ended because node local-0 failed",
    ),
    "none-where-all-wait": (
        Still(ENDED, [gave_up()], ranks={rank: Does() for rank in (0, 2, 3)}),
        "node local-1 ended because node local-0 failed",
    ),
    "none-where-a-rank-failed-by-itself": (
        Still(ENDED, [gave_up(), Error(3, LOST + 1)], ranks={0: Does(process="T")}),
        "rank 3 (stage 1, dp 1, tp 0, node local-1) failed with RuntimeError: boom",
    ),
    "none-that-an-earlier-start-has-left": (
        Still(
            [Node("ended", 1, started=LOST - 30, ended=NOW - 5), FOLLOWED],
            [gave_up()],
            ranks={0: Does("works", LOST - 100, process="T")},
        ),
        "node local-1 ended because node local-0 failed",
    ),
}


def judged(case: Case, tmp_path: Path) -> Verdict:
    return judge(case.make(tmp_path / "run"), NOW)


@pytest.mark.parametrize(("case", "reason"), CASES.values(), ids=CASES.keys())
def test_the_rank_that_held_the_others_up_is_blamed(tmp_path: Path, case: Case, reason: str) -> None:
    verdict = judged(case, tmp_path)
    assert verdict.state is State.failed
    assert verdict.reason.startswith(reason), verdict.reason
    assert (verdict.rule == "rank-stood-still") == ("stood still" in reason)


def test_others_that_stood_still_are_named_too(tmp_path: Path) -> None:
    case, _ = CASES["several-the-longest-first"]
    assert judged(case, tmp_path).reason.endswith("; the same holds for rank 0")


def test_while_nodes_still_end_it_is_named_as_far_as_it_is_known(tmp_path: Path) -> None:
    verdict = judged(Still([ended(1), Node()], [gave_up()], ranks={0: Does(process="T")}), tmp_path)
    assert (verdict.state, verdict.rule) == (State.failing, "rank-stood-still")
    assert verdict.reason.startswith("rank 0 (stage 0, dp 0, tp 0, node local-0) stood still: its process 100 was")
    assert verdict.reason.endswith("; not all nodes have reported yet")


def test_while_a_node_ends_no_rank_of_another_is_blamed_for_its_work(tmp_path: Path) -> None:
    """No rank has lost another one yet; one was killed with its node."""
    killed = Error(3, NOW - 6, "Killed", "killed by SIGTERM")
    case = Still([Node(), ended(143, "SIGTERM", NOW - 6)], [killed], ranks={0: AT_WORK, 1: Does()})
    verdict = judged(case, tmp_path)
    assert (verdict.state, verdict.rule) == (State.failing, "ended-from-outside"), verdict


@pytest.mark.parametrize("does", [Does(process="T"), Does("works", NOW - 12)], ids=["stopped", "at-work"])
def test_a_run_that_stalls_says_which_rank_stands_still(tmp_path: Path, does: Does) -> None:
    verdict = judged(Still(last=20, age=31, ranks={0: Does(), 1: Does(), 2: does, 3: Does()}), tmp_path)
    assert verdict.state is State.stalled
    assert "; rank 2 (stage 1, dp 0, tp 0, node local-1) stands still: " in verdict.reason


def test_a_run_whose_rank_is_stopped_has_stalled_before_the_log_is_late(tmp_path: Path) -> None:
    verdict = judged(Still(last=20, age=12, ranks={0: Does(), 2: Does(process="T")}), tmp_path)
    assert (verdict.state, verdict.rule) == (State.stalled, "process-stopped")
    told = "rank 2 (stage 1, dp 0, tp 0, node local-1) stands still: its process 102 was stopped by SIGSTOP or Ctrl-Z"
    assert verdict.reason.startswith(told)


def test_or_has_begun(tmp_path: Path) -> None:
    """The others wait where they wait for files, for which they have hours."""
    waits = Does(what="waiting for the index maps", iteration=0)
    verdict = judged(Still(ranks={0: Does("works", NOW - 30, "T"), 1: waits, 2: waits, 3: waits}), tmp_path)
    assert (verdict.state, verdict.rule) == (State.stalled, "process-stopped")


def test_one_that_a_debugger_has_stopped_just_now_is_not_blamed(tmp_path: Path) -> None:
    verdict = judged(Still(last=20, age=12, ranks={0: Does(), 2: Does(since=NOW - 3, process="t")}), tmp_path)
    assert verdict.state is State.running


def test_while_one_rank_works_and_the_others_wait_for_it_that_is_evidence(tmp_path: Path) -> None:
    """Such as rank 0 that makes the index maps: it may be as it should be."""
    waits = Does(what="waiting for the index maps", iteration=0)
    works = Does("works", NOW - 30, "R", "finding the other ranks", 0)
    verdict = judged(Still(ranks={0: works, 1: waits, 2: waits, 3: waits}), tmp_path)
    assert verdict.state is State.running
    assert (
        "rank 0 (stage 0, dp 0, tp 0, node local-0) keeps the others waiting: computing for 30 s "
        "(before the first iteration, after: finding the other ranks); its process 100 runs"
    ) in verdict.evidence


def test_ranks_that_all_compute_for_long_are_not_blamed(tmp_path: Path) -> None:
    ranks = {rank: Does("works", NOW - 40 - rank, "R") for rank in range(4)}
    verdict = judged(Still(last=20, age=45, ranks=ranks), tmp_path)
    assert verdict.reason == "no iteration logged for 45 s; usually one takes 1.0 s"


def test_files_of_an_engine_that_does_not_tell_what_its_ranks_do_are_read(tmp_path: Path) -> None:
    run = Still(last=20, age=31).make(tmp_path / "run")
    run.write_json(run.node_ranks("local-0"), [{"rank": 0, "pid": 1, "exit_code": None, "ended_unix": None}])
    run.node_ranks("local-1").unlink()
    assert judge(run, NOW).state is State.stalled
