"""A checkpoint appears whole or not at all, and does not depend on the layout that wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ext import safetensors
from megatron_ext.errors import EngineError
from tests.megatron_ext.engine_run import VOCAB, EngineRun, make_run


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


def test_a_rank_that_fails_while_writing_leaves_no_checkpoint_under_its_name(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = safetensors.write

    def failing(path: Path, *content: dict) -> None:
        if path.stem == "head":
            raise EngineError(f"{path}: No space left on device")
        write(path, *content)

    monkeypatch.setattr(safetensors, "write", failing)
    run = engine_run("parallel.data=1", "parallel.pipeline=2")
    assert run.go() == 1
    causes = [error for error in run.errors() if not error["symptom"]]
    assert [error["stage"] for error in causes] == [1]
    assert "No space left on device" in causes[0]["message"]
    assert not (run.run.checkpoints / "latest").exists()
    assert not list(run.run.checkpoints.glob("iter_*"))
