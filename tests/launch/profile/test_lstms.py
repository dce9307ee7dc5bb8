"""Models of LSTMs from a profile to a plan to a run, with and without a flush."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fasop.costs.profiles import files as profiles
from launch.cli import main
from tests.support.megatron_ext.engine_run import make_corpus


def language(folder: Path) -> list[str]:
    data = make_corpus(folder)
    sizes = ("model.sequence_length=12", "model.hidden=24", "model.embedding_width=16", "model.vocab_size=61")
    return [f"data.prefix={data}", *sizes, "model.untie_embeddings_and_output_weights=true"]


def video(folder: Path) -> list[str]:
    assert main(["data", "videos", "--source", "shapes", "--count", "30", "--output", str(folder / "shapes")]) == 0
    return [f"data.prefix={folder / 'shapes'}", "model.hidden=24", "model.embedding_width=16"]


MODELS: dict[str, Callable[[Path], list[str]]] = {"awd-lm-tiny": language, "s2vt-tiny": video}
QUICK = ("micro_batches=1,2", "seconds=0.02", "profile=mine")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_it_is_measured_and_its_plans_are_ones_that_launch_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [f"model={model}", *MODELS[model](tmp_path), "cluster.groups.local.gpus_per_node=2"]
    assert main(["profile", *words, "parallel=single", *QUICK]) == 0
    searched = ["search", *words, "profile=mine", "parallel.pipeline=2", "parallel.global_batch_size=4"]
    ways = {
        "flush": ["top=1"],
        "stream": ["parallel.schedule=pipedream", "parallel.micro_batch_size=1", "straight=true"],
    }
    for name, way in ways.items():
        given = [one for one in searched if name == "flush" or not one.startswith("parallel.pipeline")]
        capsys.readouterr()
        assert main([*given, *way, f"plan=./{name}.yaml"]) == 0, capsys.readouterr().err
        found = capsys.readouterr()
        assert "not measured" not in found.out + found.err
        assert yaml.safe_load((tmp_path / f"{name}.yaml").read_text())["pipeline"] == 2
        run = ["launch", *words, f"parallel=./{name}.yaml", "parallel.global_batch_size=4", "train.iterations=6"]
        assert main(run) == 0, capsys.readouterr().err
