"""A run folder is made once, has the files that it names, and is found by whatever a person remembers of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

import pytest

from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from megatron_ext.contract.files import write_atomic
from tests.support import PATIENCE_S
from tests.support.ordinary_user import open_to_others, ordinary_user

NOW = datetime(2024, 5, 6, 7, 8, 9)


def made(runs: Path, name: str, config: str = "a", now: datetime = NOW, job: str | None = None) -> RunDir:
    """A run as `launch` leaves it: with its configuration, its plan and the link of its job."""
    run = RunDir.create(runs, name, config, now)
    write_atomic(run.config, config)
    run.write_json(run.plan, {"version": 1})
    if job is not None:
        run.link_job(job)
    return run


def create_some(runs: Path, names: multiprocessing.Queue, start: multiprocessing.Event) -> None:
    start.wait(PATIENCE_S)  # type: ignore[attr-defined]
    for _ in range(20):
        names.put(RunDir.create(runs, "tiny", "same", NOW).name)


def test_processes_that_start_the_same_run_at_once_get_a_folder_each(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    names, start = context.Queue(), context.Event()
    processes = [context.Process(target=create_some, args=(tmp_path, names, start)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    made_names = [names.get(timeout=PATIENCE_S) for _ in range(4 * 20)]
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(set(made_names)) == 4 * 20
    assert {f"tiny/{path.name}" for path in (tmp_path / "tiny").iterdir()} == set(made_names)


@pytest.mark.parametrize("name", ["two words", 'it\'s "it"', "größe 模型", "$HOME;`ls`", "a=b", "*?[x]"])
def test_any_name_makes_a_folder_of_that_name_which_is_found(tmp_path: Path, name: str) -> None:
    run = made(tmp_path / name, name)
    assert run.path.parent == tmp_path / name / name
    assert run.runs == tmp_path / name
    assert RunDir.find(tmp_path / name, name) == run


def test_a_folder_name_tells_time_and_configuration(tmp_path: Path) -> None:
    first, other, again = (RunDir.create(tmp_path, "tiny", text, NOW).path.name for text in "aba")
    assert first.startswith(f"{NOW.astimezone(UTC):%Y%m%d-%H%M%S}Z-")
    assert first != other
    assert again == f"{first}.1"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the time zone of this process."""

    def show(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield show
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("before", "after", "looking"),
    [
        pytest.param("CET-2", "CET-1", "CET-1", id="the-clock-goes-back"),
        pytest.param("UTC", "PST8", "UTC", id="a-container-in-UTC-then-a-login-node"),
        pytest.param("NZDT-13", "PST8", "CET-1", id="looked-at-from-a-third-place"),
    ],
)
def test_an_instant_decides_which_run_is_the_latest(
    tmp_path: Path, clock: Callable[[str], None], before: str, after: str, looking: str
) -> None:
    began = NOW.replace(tzinfo=UTC).timestamp()
    clock(before)
    older = made(tmp_path, "tiny", now=datetime.fromtimestamp(began))
    clock(after)
    newer = made(tmp_path, "tiny", now=datetime.fromtimestamp(began + 60))
    clock(looking)
    assert list(RunDir.all(tmp_path)) == [older, newer]
    assert RunDir.find(tmp_path, "tiny") == RunDir.find(tmp_path, "latest") == newer
    assert RunDir.alike(tmp_path, "tiny", "a") == [newer, older]
    assert (older.launched_unix, newer.launched_unix) == (began, began + 60)


def test_runs_of_earlier_versions_have_the_instant_of_their_provenance(
    tmp_path: Path, clock: Callable[[str], None]
) -> None:
    began = NOW.replace(tzinfo=UTC).timestamp()
    clock("CET-1")
    newer = made(tmp_path, "tiny", now=datetime.fromtimestamp(began + 60))
    older = RunDir(newer.path.with_name("20240506-090809-0123abcd"))
    shutil.copytree(newer.path, older.path)
    assert RunDir.find(tmp_path, "tiny") == older  # an hour later here, where nothing else is known
    older.write_json(older.provenance, {"unix": began})
    assert (RunDir.find(tmp_path, "tiny"), older.launched_unix) == (newer, began)
    older.provenance.write_text("{")
    assert RunDir.find(tmp_path, "tiny/20240506-090809-0123abcd") == older


def test_a_new_run_has_its_folders_and_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir.create(Path("runs"), "tiny", "a", NOW)
    assert run.path.is_absolute()
    assert all(folder.is_dir() for folder in (run.nodes, run.events, run.errors, run.checkpoints, run.submitit))
    assert run.node_out("gpu2-0").parent == run.nodes
    assert (run.rank_events(12).name, run.rank_error(12).name) == ("rank-00012.bin", "rank-00012.json")


@pytest.mark.parametrize(
    "wanted",
    [
        lambda run: str(run.path),
        lambda run: os.path.relpath(run.path),
        lambda run: run.name,
        lambda run: run.path.name,
        lambda run: "4711",
        lambda run: "4711+1",
        lambda run: f"{run.path}/",
        lambda run: str(run.nodes),
        lambda run: str(run.plan),
        lambda run: os.path.relpath(run.runs / "by_job" / "4711"),
    ],
    ids=[
        "folder",
        "relative folder",
        "name/time-hash",
        "time-hash",
        "job id",
        "component of a heterogeneous job",
        "folder with a slash",
        "folder in it",
        "file in it",
        "link of its job",
    ],
)
def test_a_run_is_found_by(tmp_path: Path, wanted) -> None:
    run = made(tmp_path, "tiny", job="4711")
    made(tmp_path, "tiny", "b", datetime(2025, 1, 1))
    assert RunDir.find(tmp_path, wanted(run)) == run


def test_a_name_finds_the_latest_run_of_that_name(tmp_path: Path) -> None:
    made(tmp_path, "tiny")
    latest = made(tmp_path, "tiny", "b", datetime(2024, 6, 1))
    made(tmp_path, "xl", "c", datetime(2024, 7, 1))
    assert RunDir.find(tmp_path, "tiny") == latest


def test_nothing_finds_the_latest_of_all(tmp_path: Path) -> None:
    latest = made(tmp_path, "a", "a", datetime(2024, 7, 1), job="1")
    made(tmp_path, "z", "a", datetime(2024, 6, 1), job="2")
    assert RunDir.find(tmp_path, None) == latest


@pytest.mark.parametrize(
    "wanted",
    [
        lambda runs: "tiny",
        lambda runs: str(runs / "tiny"),
        lambda runs: f"{os.path.relpath(runs)}/tiny/",
        lambda runs: str(runs),
        lambda runs: "latest",
        lambda runs: None,
    ],
    ids=["name", "folder of a name", "relative folder", "folder of all", "latest", "nothing"],
)
def test_of_several_runs_the_latest_is_meant(tmp_path: Path, wanted) -> None:
    made(tmp_path, "small", "c", datetime(2024, 5, 1))
    made(tmp_path, "tiny")
    latest = made(tmp_path, "tiny", "b", datetime(2024, 6, 1))
    assert RunDir.find(tmp_path, wanted(tmp_path)) == latest


def test_a_run_called_latest_is_found_by_its_name(tmp_path: Path) -> None:
    run = made(tmp_path, "latest")
    made(tmp_path, "tiny", now=datetime(2025, 1, 1))
    assert RunDir.find(tmp_path, "latest") == run


def test_a_folder_of_another_kind_does_not_hide_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "runs", "tiny")
    (tmp_path / "tiny" / "corpus").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert RunDir.find(Path("runs"), "tiny") == run


def test_a_run_whose_job_has_no_link_yet_is_found_by_its_job(tmp_path: Path) -> None:
    run = made(tmp_path, "tiny")
    run.write_json(run.jobs, {"jobs": [{"id": "4711"}, {"id": None}]})
    made(tmp_path, "other", now=datetime(2025, 1, 1)).jobs.write_text("{")
    assert RunDir.find(tmp_path, "4711") == run


def test_a_launch_that_was_cut_off_is_the_latest_too(tmp_path: Path) -> None:
    made(tmp_path, "tiny")
    cut_off = RunDir.create(tmp_path, "tiny", "b", datetime(2025, 1, 1))
    assert RunDir.find(tmp_path, None) == cut_off
    assert RunDir.find(tmp_path, cut_off.name) == cut_off
    assert cut_off not in RunDir.all(tmp_path)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with open_to_others() as folder:
        yield folder


def test_a_closed_run_says_whose_it_is_and_hides_no_other(open_folder: Path) -> None:
    closed, latest = made(open_folder, "tiny"), made(open_folder, "tiny", "b", datetime(2024, 6, 1))
    closed_name = made(open_folder, "closed", now=datetime(2025, 1, 1)).path.parent
    for folder in (closed.path, closed_name):
        folder.chmod(0)
    with ordinary_user():
        assert list(RunDir.all(open_folder)) == [latest]
        assert RunDir.find(open_folder, "tiny") == latest
        for path in (closed.path, closed_name):
            with pytest.raises(RunFolderError, match=f"{path}: you may not read this folder; it belongs to"):
                RunDir.find(open_folder, str(path))
        with pytest.raises(RunFolderError, match=rf"not accessible \(Permission denied: {closed_name}"):
            RunDir.find(open_folder, f"{closed_name}/1-1")


def test_all_runs_come_once_each_oldest_first(tmp_path: Path) -> None:
    july, june = made(tmp_path, "a", now=datetime(2024, 7, 1), job="1"), made(tmp_path, "b", now=datetime(2024, 6, 1))
    RunDir.create(tmp_path, "c", "cut off before its plan was written", NOW)
    (tmp_path / "sweeps" / "20240101-000000").mkdir(parents=True)
    assert list(RunDir.all(tmp_path)) == [june, july]


def test_runs_that_come_and_go_meanwhile_are_no_error(tmp_path: Path) -> None:
    stays = made(tmp_path, "stays")
    done = Event()

    def come_and_go() -> None:
        while not done.is_set():
            shutil.rmtree(made(tmp_path, "passing").path.parent)

    other = Thread(target=come_and_go)
    other.start()
    try:
        assert all(stays in RunDir.all(tmp_path) for _ in range(50))
    finally:
        done.set()
        other.join()


def test_what_fits_several_runs_names_them(tmp_path: Path) -> None:
    names = [made(tmp_path, name).name for name in ("a", "b")]
    with pytest.raises(RunFolderError, match="matches several runs") as caught:
        RunDir.find(tmp_path, Path(names[0]).name)
    assert all(name in str(caught.value) for name in names)


def test_what_fits_no_run_is_told_with_the_latest(tmp_path: Path) -> None:
    run = made(tmp_path, "tiny")
    with pytest.raises(RunFolderError, match=f"no run 'nope' in .*; the nearest are {run.name}"):
        RunDir.find(tmp_path, "nope")


@pytest.mark.parametrize("wanted", [None, "tiny"], ids=["latest", "a name"])
def test_no_runs_at_all_says_how_to_start_one(tmp_path: Path, wanted: str | None) -> None:
    with pytest.raises(RunFolderError, match=r"no runs in .*; start one with 'tdpp launch', or name the"):
        RunDir.find(tmp_path / "runs", wanted)


def test_a_runs_folder_that_is_a_file_is_told_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunFolderError, match=r"runs_dir=.*/runs: cannot create a run folder there"):
        RunDir.create(tmp_path / "runs", "tiny", "a", NOW)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_runs_folder_that_cannot_be_written_is_told_with_the_key(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunFolderError, match=r"runs_dir=.*Permission denied"):
        RunDir.create(tmp_path, "tiny", "a", NOW)


def test_writing_replaces_the_whole_file_and_leaves_only_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomic(path, "a longer text than the next")
    write_atomic(path, "größer")
    assert path.read_text(encoding="utf-8") == "größer"
    assert path.stat().st_mode & 0o777 == 0o644, "other users of the cluster may read it"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_keeps_the_old_text_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_over_a_folder_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "plan.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_json_is_read_as_written_and_none_before(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.read_json(run.jobs) is None
    run.write_json(run.jobs, {"jobs": []})
    assert run.read_json(run.jobs) == {"jobs": []}
    assert json.loads(run.jobs.read_text(encoding="utf-8")) == {"jobs": []}


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.jobs.write_text("{")
    with pytest.raises(RunFolderError, match=r"jobs\.json is not JSON"):
        run.read_json(run.jobs)
