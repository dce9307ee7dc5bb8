"""The records of runs, from the files of thirty of them: a real run's folder, copied with other hosts and events."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from conf.compose import compose_unchecked
from conf.errors import RunFolderError, TdppError
from launch.commands import nodes
from launch.commands.launching.resolve_auto import resolve_auto
from launch.errors import LaunchError
from launch.history import ledger
from launch.judge.state import State
from launch.judge.verdict import judge
from megatron_ext.contract import events
from tests.support.launch.live import start, wait_for

pytestmark = pytest.mark.slow

HOSTS = [f"gpu2-{number:03d}" for number in range(1, 8)]
FOUR_NODES = ("cluster.groups.local.count=4", "cluster.groups.local.gpus_per_node=1", "parallel.micro_batch_size=1")
NAMES = [
    "forward-compute",
    "backward-compute",
    "tensor-all-reduce",
    "optimizer",
    "clock",
    "forward-send",
    "forward-recv",
]
NAMES += ["backward-send", "backward-recv"]
SLOW, BROKEN, FAR = "gpu2-003", "gpu2-006", "gpu2-001"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = start(tmp_path_factory.mktemp("template"), *FOUR_NODES)
    wait_for(lambda: judge(run).state is State.succeeded)
    return run.path


def write_events(run: Path, rank: int, ms: float) -> None:
    """Iterations of two micro-batches, whose passes take so long without the wait for a tensor group within them."""
    content, now = [events.head({"rank": rank, "names": NAMES, "host": "x"})], 0
    for iteration in range(1, 9):
        for micro_batch in range(2):
            for name, part in ((0, 1 / 3), (1, 2 / 3)):
                lasts = round((ms * part + 1.0) * 1e6)
                content.append(events.RECORD.pack(name, 0, iteration, micro_batch, -1, now, now + lasts))
                content.append(events.RECORD.pack(2, 0, iteration, micro_batch, -1, now, now + 1_000_000))
                now += lasts
        content.append(events.RECORD.pack(3, 0, iteration, -1, -1, now, now + 5_000_000))
    (run / "events").mkdir(exist_ok=True)
    (run / "events" / f"rank-{rank:05d}.bin").write_bytes(b"".join(content))


def write_messages(run: Path, ranks: list[int], ms: Callable[[int, int], float]) -> None:
    """Adds messages of ranks of stages that follow each other, whose clocks differ; every second receiver came late."""
    lines: dict[int, list[bytes]] = {
        rank: [events.RECORD.pack(4, 0, 0, -1, 0, 0, -(10**9) * place)] for place, rank in enumerate(ranks)
    }

    def note(rank: int, name: int, iteration: int, micro_batch: int, peer: int, start: int, end: int) -> None:
        ahead = 10**9 * ranks.index(rank)
        lines[rank].append(events.RECORD.pack(name, 0, iteration, micro_batch, peer, start + ahead, end + ahead))

    for one, other in pairwise(ranks):
        lasts = round(ms(one, other) / 2 * 1e6)
        for iteration in range(1, 9):
            for micro_batch in range(2):
                now, late = 10**8 * iteration, 10**7 * micro_batch
                for name, sender, receiver in ((5, one, other), (7, other, one)):
                    note(sender, name, iteration, micro_batch, receiver, now, now + 1000)
                    arrived = now + max(lasts, late)
                    note(receiver, name + 1, iteration, micro_batch, sender, now - 1000 + late, arrived + 10)
    for rank, content in lines.items():
        with (run / "events" / f"rank-{rank:05d}.bin").open("ab") as file:
            file.write(b"".join(content))


def emulated(
    template: Path,
    runs: Path,
    number: int,
    hosts: dict[str, str],
    *,
    slow: str,
    broken: str | None,
    far: str | None = None,
) -> Path:
    """A copy of the run, its nodes on these hosts; with `broken` the agent of that host's node was killed, and messages
    from and to `far` take twice as long."""
    folder = runs / "emulated" / f"20260{1 + number // 28}{1 + number % 28:02d}-120000Z-01234567"
    shutil.copytree(template, folder, ignore=shutil.ignore_patterns("history.json"))
    draw = random.Random(number)
    plan = json.loads((folder / "plan.json").read_text())
    for place in plan["ranks"]:
        host = hosts[plan["nodes"][place["node"]]["name"]]
        usual = 6.0 + place["stage"]
        write_events(folder, place["rank"], usual * (1.1 if host == slow else 1.0) * draw.gauss(1.0, 0.02))
    if far is not None:
        of = {place["rank"]: hosts[plan["nodes"][place["node"]]["name"]] for place in plan["ranks"]}
        stages = sorted((place["stage"], place["rank"]) for place in plan["ranks"] if place["dp"] == 0)

        def ms(*ends: int) -> float:
            return 5.0 * (2.0 if far in [of[rank] for rank in ends] else 1.0) * draw.gauss(1.0, 0.1)

        write_messages(folder, [rank for _, rank in stages], ms)
    for node, host in hosts.items():
        file = folder / "nodes" / f"{node}.json"
        state = json.loads(file.read_text()) | {"host": host}
        if host == broken:
            state |= {"exit_code": -9}
        file.write_text(json.dumps(state))
    return folder


def all_runs(template: Path, runs: Path, *, slow: str = "", broken: str = "", far: str = "") -> None:
    draw, left = random.Random(1), 2
    names = sorted(path.stem for path in (template / "nodes").glob("*-?.json"))
    for number in range(30):
        chosen = draw.sample(HOSTS, len(names))
        fails = broken in chosen and left > 0 and number >= 7
        left -= fails
        hosts = dict(zip(names, chosen, strict=True))
        emulated(template, runs, number, hosts, slow=slow, broken=broken if fails else None, far=far)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder  # type: ignore[return-value]


def flagged(runs: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert nodes.main(["--runs-dir", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {host["host"] for host in found} == set(HOSTS)
    return {host["host"]: host["health"] for host in found if host["health"] != "healthy"}


def test_a_slow_a_failing_and_a_far_host_are_found_in_thirty_runs(
    template: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    all_runs(template, runs, slow=SLOW, broken=BROKEN, far=FAR)
    assert flagged(runs, capsys) == {FAR: "slow", SLOW: "slow", BROKEN: "failing"}
    kept = [path.read_text() for path in runs.glob("*/*/history.json")]
    assert len(kept) == 30
    assert flagged(runs, capsys) == {FAR: "slow", SLOW: "slow", BROKEN: "failing"}  # from what was kept
    assert nodes.main(["--runs-dir", str(runs), BROKEN]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{BROKEN}: failing: 2 of its last ")
    assert "worker-killed" in told
    page = runs / "nodes.html"
    assert nodes.main(["--runs-dir", str(runs), "--page", str(page)]) == 0
    html = page.read_text()
    assert "7 hosts, 3 not healthy" in html
    assert f"{FAR}: slow: its messages to and from " in html
    assert f"{SLOW}: slow: takes 1." in html


def test_thirty_quiet_runs_flag_no_host(template: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    all_runs(template, runs)
    assert flagged(runs, capsys) == {}


def test_the_record_of_a_run_that_was_started_again_is_made_anew(template: Path, runs: Path) -> None:
    names = sorted(path.stem for path in (template / "nodes").glob("*-?.json"))
    folder = emulated(template, runs, 0, dict(zip(names, HOSTS, strict=False)), slow="", broken=None)
    (first,) = ledger.records(runs)
    (folder / "history.json").write_text("{")
    assert ledger.records(runs) == [first]
    (folder / "history.json").unlink()
    os.mkfifo(folder / "history.json")  # nobody writes to it
    assert ledger.records(runs) == [first]
    state = json.loads((folder / "nodes" / f"{names[0]}.json").read_text())
    (folder / "nodes" / f"{names[0]}.json").write_text(json.dumps(state | {"host": "elsewhere"}))
    assert ledger.records(runs) == [first]
    (folder / "jobs.json").touch()
    (again,) = ledger.records(runs)
    assert "elsewhere" in {host.host for host in again.hosts}


def test_a_host_whose_failure_only_started_a_run_again_is_found(
    template: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not among the hosts of the run's end, or is there again; two such failures make it a failing one."""
    names = sorted(path.stem for path in (template / "nodes").glob("*-?.json"))
    for number in range(6):
        hosts = [host for host in HOSTS if number != 2 or host != BROKEN][:4]
        folder = emulated(template, runs, number, dict(zip(names, hosts, strict=True)), slow="", broken=None)
        if number in (2, 4):
            restart = {"unix": 1.8e9, "reason": f"{BROKEN} failed, NODE_FAIL", "hosts": [BROKEN]}
            (folder / "restart-0.1.json").write_text(json.dumps(restart))
            (folder / "restart-0.2.json").write_text("{")
    assert nodes.main(["--runs-dir", str(runs), "--json"]) == 0
    found = {host["host"]: host for host in json.loads(capsys.readouterr().out)}
    assert {name for name, host in found.items() if host["health"] != "healthy"} == {BROKEN}
    assert found[BROKEN]["health"] == "failing"
    assert nodes.main(["--runs-dir", str(runs), BROKEN]) == 0
    assert f"{BROKEN} failed, NODE_FAIL" in capsys.readouterr().out


def test_events_that_are_cut_off_or_missing_leave_the_rest(template: Path, runs: Path) -> None:
    names = sorted(path.stem for path in (template / "nodes").glob("*-?.json"))
    folder = emulated(template, runs, 0, dict(zip(names, HOSTS, strict=False)), slow="", broken=None)
    files = [folder / "events" / f"rank-0000{rank}.bin" for rank in range(4)]
    files[0].unlink()
    os.mkfifo(files[0])
    files[1].write_bytes(files[1].read_bytes()[:-7])
    files[2].write_bytes(events.MAGIC + struct.pack("<I", 2) + b"[]")
    files[3].write_bytes(b"TDPPEVT1\xff\xff\xff\xff")
    (record,) = ledger.records(runs)
    assert [bool(host.work) for host in record.hosts].count(True) == 1
    assert len(record.hosts) == 4


def test_times_of_messages_and_the_driver_are_recorded(template: Path, runs: Path) -> None:
    names = sorted(path.stem for path in (template / "nodes").glob("*-?.json"))
    folder = emulated(template, runs, 0, dict(zip(names, HOSTS, strict=False)), slow="", broken=None)
    plan = json.loads((folder / "plan.json").read_text())
    replica = sorted((place["stage"], place["rank"]) for place in plan["ranks"] if place["dp"] == 0)
    write_messages(folder, [rank for _, rank in replica], lambda one, other: 6.0)
    (folder / "nodes" / f"{names[1]}.machine.json").write_text('{"driver": "550.54"}')
    (folder / "nodes" / f"{names[2]}.machine.json").write_text("[]")
    (record,) = ledger.records(runs)
    links = [(name.split()[1], took) for host in record.hosts for name, took in host.links.items()]
    assert len(links) == plan["pipeline"] - 1 > 0
    assert [took for _, took in links] == pytest.approx([6.0] * len(links), abs=1e-3)
    assert {host.driver for host in record.hosts} == {"550.54", None}
    assert ledger.records(runs) == [record]  # from what was kept


def test_without_a_run_that_is_over_the_message_says_so(runs: Path) -> None:
    with pytest.raises(LaunchError, match="no run there is over"):
        nodes.main(["--runs-dir", str(runs)])
    with pytest.raises(RunFolderError, match="No such file or directory"):
        nodes.main(["--runs-dir", str(runs / "none")])


def test_a_page_that_cannot_be_written_is_one_message(template: Path, runs: Path) -> None:
    names = sorted(path.stem for path in (template / "nodes").glob("*-?.json"))
    emulated(template, runs, 0, dict(zip(names, HOSTS, strict=False)), slow="", broken=None)
    with pytest.raises(TdppError, match=r"cannot write .*/none/x\.html: "):
        nodes.main(["--runs-dir", str(runs), "--page", str(runs / "none" / "x.html")])


def test_an_unknown_host_is_answered_with_the_nearest(template: Path, runs: Path) -> None:
    names = sorted(path.stem for path in (template / "nodes").glob("*-?.json"))
    emulated(template, runs, 0, dict(zip(names, HOSTS, strict=False)), slow="", broken=None)
    with pytest.raises(LaunchError, match="no run was on a host 'gpu2-03'; did you mean gpu2-003"):
        nodes.main(["--runs-dir", str(runs), "gpu2-03"])


def test_hosts_that_are_not_healthy_get_no_job(template: Path, runs: Path) -> None:
    all_runs(template, runs, slow=SLOW, broken=BROKEN)
    words = [f"runs_dir={runs}", "experiment=seed_a100x1_a10x7"]
    experiment, told = resolve_auto(compose_unchecked([*words, "cluster.exclude=[auto,gpu2-001]"]))
    assert experiment.cluster.exclude == ["gpu2-001", SLOW, BROKEN]
    assert told is not None
    assert told.startswith(f"cluster.exclude=auto leaves out {SLOW}, slow: takes 1.")
    same, told = resolve_auto(compose_unchecked([*words, "cluster.exclude=[gpu2-001]"]))
    assert (same.cluster.exclude, told) == (["gpu2-001"], None)
