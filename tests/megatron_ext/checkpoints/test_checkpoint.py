"""A checkpoint appears whole or not at all, and does not depend on the layout that wrote it."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.checkpoints import safetensors, saving
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.errors import EngineError
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.results import StepResult
from megatron_ext.tasks.language import language_task
from tests.support.full_disk import largest_file
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_run


def test_parts_are_named_by_the_whole_model_whatever_the_partition(tmp_path: Path, corpus: Path) -> None:
    layouts = {"one": ("parallel.pipeline=1",), "three": ("parallel.pipeline=3", "parallel.partition=0-1-2")}
    written = {}
    for name, overrides in layouts.items():
        run = make_run(tmp_path / name, corpus, "parallel.data=2", *overrides)
        assert run.go() == 0, run.stderr()
        folder = run.run.checkpoints / "iter_0000004"
        assert (run.run.checkpoints / "latest").read_text() == "iter_0000004\n"
        meta = json.loads((folder / "meta.json").read_text())
        assert (meta["iteration"], meta["consumed_samples"]) == (4, 32)
        written[name] = {path.stem: safetensors.read(path) for path in folder.glob("*.safetensors")}
    assert sorted(written["one"]) == ["embedding", "head", *(f"layer-{i:05d}" for i in range(3))]
    for part, tensors in written["one"].items():
        assert tensors.keys() == written["three"][part].keys()
        for name, tensor in tensors.items():
            assert torch.allclose(tensor, written["three"][part][name], rtol=0, atol=1e-5), (part, name)
    assert written["one"]["head"]["adam_m/norm.weight"].abs().max() > 0
    assert len(written["one"]["embedding"]["weights/word"]) == VOCAB


TWO_STAGES = ("parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2", "train.save_interval=2")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Four iterations without any trouble."""
    run = make_run(tmp_path_factory.mktemp("whole") / "run", corpus, *TWO_STAGES)
    assert run.go() == 0, run.stderr()
    return run


def names(run: EngineRun) -> list[str]:
    return sorted(path.name for path in run.run.checkpoints.iterdir())


def assert_equal(found: EngineRun, expected: EngineRun) -> None:
    state = expected.state()
    assert found.state().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.state().items())


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_the_newest_are_kept(engine_run: Callable[..., EngineRun], keep: int) -> None:
    run = engine_run(*TWO_STAGES, "train.save_interval=1", f"train.keep_checkpoints={keep}")
    assert run.go() == 0, run.stderr()
    expected = [f"iter_{iteration:07d}" for iteration in range(1, 5)][-keep:]
    assert names(run) == [*expected, "latest"]
    assert Checkpoint.at(run.run.path).folder.name == "iter_0000004"


def test_without_saving_there_is_none(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run("train.checkpoint=false")
    assert run.go() == 0, run.stderr()
    assert names(run) == []


def test_saved_by_a_thread_it_is_the_same_although_training_goes_on(
    engine_run: Callable[..., EngineRun], whole: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    write, step = safetensors.write, Engine.step

    def slowly(path: Path, *content: dict) -> None:
        time.sleep(0.3)
        write(path, *content)

    def watched(self: Engine, iteration: int) -> StepResult:
        begun.append((iteration, (self._plan.folder / "checkpoints" / "latest").exists()))
        (self._plan.folder / f"begun-{self._place.rank}.json").write_text(json.dumps(begun))
        return step(self, iteration)

    monkeypatch.setattr(safetensors, "write", slowly)
    monkeypatch.setattr(Engine, "step", watched)
    run = engine_run(*TWO_STAGES, "train.save_async=true")
    assert run.go() == 0, run.stderr()
    assert [3, False] in json.loads((run.run.path / "begun-0.json").read_text())
    assert names(run) == names(whole) == ["iter_0000002", "iter_0000004", "latest"]
    for path in whole.run.checkpoints.glob("iter_*/*.safetensors"):
        found = run.run.checkpoints / path.relative_to(whole.run.checkpoints)
        assert found.read_bytes() == path.read_bytes(), found


def test_indexing_and_saving_may_take_longer_than_any_message(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = safetensors.write

    class SlowSamples(GptSamples):
        def __init__(self, *given: Any, **named: Any) -> None:
            time.sleep(5 if dist.get_rank() == 0 else 0)
            super().__init__(*given, **named)

    def slowly(path: Path, *content: dict) -> None:
        time.sleep(5 if path.stem == "head" else 0)
        write(path, *content)

    monkeypatch.setattr(language_task, "GptSamples", SlowSamples)
    monkeypatch.setattr(safetensors, "write", slowly)
    run = engine_run(*TWO_STAGES, "train.save_interval=null", "train.comm_timeout_s=3")
    assert run.go() == 0, run.stderr()
    assert names(run) == ["iter_0000004", "latest"]


def fail(path: Path) -> None:
    raise EngineError(f"{path}: cannot be written: [Errno 28] No space left on device")


def die(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("part", ["embedding", "head"])
@pytest.mark.parametrize("trouble", [fail, die])
@pytest.mark.parametrize("by_a_thread", [False, True], ids=["at-once", "by-a-thread"])
def test_a_rank_that_cannot_write_its_part_is_named_and_the_last_good_one_stays(
    engine_run: Callable[..., EngineRun],
    whole: EngineRun,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    trouble: Callable[[Path], None],
    by_a_thread: bool,
) -> None:
    write = safetensors.write

    def troubled(path: Path, *content: dict) -> None:
        if path.stem == part and "iter_0000004" in str(path):
            trouble(path)
        write(path, *content)

    run = engine_run(*TWO_STAGES, f"train.save_async={str(by_a_thread).lower()}")
    with monkeypatch.context() as patched:
        patched.setattr(safetensors, "write", troubled)
        start = time.monotonic()
        assert run.go() == 1
        assert time.monotonic() - start < run.plan.train.comm_timeout_s
    (cause,) = [error for error in run.errors() if not error["symptom"]]
    assert cause["stage"] == (0 if part == "embedding" else 1)
    assert ("No space left" if trouble is fail else "SIGKILL") in cause["message"]
    assert Checkpoint.at(run.run.path).folder.name == "iter_0000002"
    assert [name for name in names(run) if name.startswith("iter")] == ["iter_0000002"]
    assert run.go() == 0, run.stderr()
    assert names(run) == ["iter_0000002", "iter_0000004", "latest"]
    assert_equal(run, whole)


@pytest.mark.parametrize("by_a_thread", [False, True], ids=["at-once", "by-a-thread"])
@pytest.mark.parametrize("where", ["embedding", "head", "folder", "latest"])
def test_a_save_that_fails_is_told_and_the_run_goes_on(
    engine_run: Callable[..., EngineRun],
    whole: EngineRun,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    by_a_thread: bool,
) -> None:
    write, sync, make = safetensors.write, saving._sync, saving.Saver._make_folder

    def troubled(path: Path, *content: dict) -> None:
        if path.stem == where and "iter_0000002" in str(path):
            fail(path)
        write(path, *content)

    def no_folder(saver: saving.Saver, final: Path) -> None:
        if where == "folder" and final.name == "iter_0000002":
            fail(final)
        make(saver, final)

    def no_sync(folder: Path) -> None:
        if where == "latest" and "iter_0000002" in folder.name:
            raise OSError(errno.EROFS, "Read-only file system")
        sync(folder)

    run = engine_run(*TWO_STAGES, f"train.save_async={str(by_a_thread).lower()}")
    monkeypatch.setattr(safetensors, "write", troubled)
    monkeypatch.setattr(saving, "_sync", no_sync)
    monkeypatch.setattr(saving.Saver, "_make_folder", no_folder)
    assert run.go() == 0, run.stderr()
    assert run.stderr().count("not saved, and the run goes on: ") == 1
    assert "iter_0000002" in run.stderr()
    assert names(run) == ["iter_0000004", "latest"]
    assert_equal(run, whole)


def test_a_run_that_saves_by_itself_saves_after_the_same_iterations_on_all_ranks(
    engine_run: Callable[..., EngineRun], whole: EngineRun
) -> None:
    run = engine_run(*TWO_STAGES, "train.save_interval=auto", "train.keep_checkpoints=9")
    assert run.plan.train.mtbf_s is not None
    plan = replace(run.plan, train=replace(run.plan.train, mtbf_s=1e-3))
    run.run.write_json(run.run.plan, plan.as_json())
    assert run.go() == 0, run.stderr()
    assert names(run) == ["iter_0000002", "iter_0000003", "iter_0000004", "latest"]
    assert "train.save_interval=auto: a save takes" in run.run.node_out("local-0").read_text()
    assert_equal(run, whole)


@pytest.mark.parametrize("after", range(4))
def test_rank_0_may_die_at_any_step_of_making_a_checkpoint_the_latest(
    engine_run: Callable[..., EngineRun], whole: EngineRun, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """`after`: the parts are on disk; meta.json is; the folder has its name; `latest` says so, old ones are left."""
    sync, write = saving._sync, saving._write
    done = 0

    def step(path: Path) -> None:
        nonlocal done
        if "0000004" in str(path) or done:
            if done == after:
                die(path)
            done += 1

    def stepping_write(path: Path, text: str) -> None:
        if path.name == "meta.json":
            step(path)
        write(path, text)

    def stepping_sync(folder: Path) -> None:
        step(folder)
        sync(folder)

    run = engine_run(*TWO_STAGES, "train.keep_checkpoints=1")
    with monkeypatch.context() as patched:
        patched.setattr(saving, "_write", stepping_write)
        patched.setattr(saving, "_sync", stepping_sync)
        assert run.go() == 1
    assert [error["type"] for error in run.errors() if not error["symptom"]] == ["Killed"]
    assert Checkpoint.at(run.run.path).folder.name == ("iter_0000002" if after < 3 else "iter_0000004")
    assert run.go() == 0, run.stderr()
    assert_equal(run, whole)
    longer = run.replan(*TWO_STAGES, "train.keep_checkpoints=1", "train.iterations=5", "train.lr_decay_iterations=4")
    assert longer.go() == 0, longer.stderr()
    assert names(longer) == ["iter_0000005", "latest"]


def test_a_full_disk_is_told_and_the_last_good_one_stays(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run(*TWO_STAGES, "train.iterations=2", "profile.timeline=false")
    assert run.go() == 0, run.stderr()
    before = run.state()
    run = run.replan(*TWO_STAGES, "profile.timeline=false")
    with largest_file(100_000):
        assert run.go() == 1
    causes = [error["message"] for error in run.errors() if not error["symptom"]]
    assert causes
    assert all("layer-0000" in cause and "cannot be written: [Errno 27] File too large" in cause for cause in causes)
    assert Checkpoint.at(run.run.path).meta.iteration == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.state().items())
    left = [path for path in run.run.checkpoints.rglob("*") if path.is_file() and "iter_0000002" not in str(path)]
    assert not [path for path in left if path.name.startswith(".") and path.suffix == ".partial"]
