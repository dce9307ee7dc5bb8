"""What was measured, as graph.txt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.errors import OutputError
from conf.reading.files import check_free
from fasop.costs.profiles.files import read_profile
from fasop.graphs.graph_text import read_graph
from launch.profile import files
from tests.support.fasop.modules import random_profile, words, written


def test_every_block_has_its_times_result_and_parameters(tmp_path: Path) -> None:
    """Of the largest micro-batch that was measured."""
    profile = random_profile(np.random.default_rng(5), tmp_path, 4)
    plan = [f"parallel.{key}" for key in ("data=1", "pipeline=1", "partition=null", "micro_batch_size=1")]
    experiment = compose([*words(tmp_path), *plan, "parallel.global_batch_size=1", "model.layers=4"])
    (gpu,) = experiment.cluster.gpus
    (file,) = files.write_graphs(
        tmp_path / "graph.txt", experiment, {gpu: read_profile(str(written(profile, tmp_path)))}
    )
    nodes, module = read_graph(file).nodes, profile.modules["module"]
    costs = max(profile.costs, key=lambda one: one.micro_batch_size)
    assert costs.sequence is not None
    for number, (node, block) in enumerate(zip(nodes, module.blocks, strict=False)):
        assert node.name == block.name
        assert node.forward_ms == pytest.approx(costs.parts[block.kind].forward, abs=6e-4)
        assert node.backward_ms == pytest.approx(costs.parts[block.kind].backward, abs=6e-4)
        assert node.parameter_bytes == 4 * block.parameters
        assert node.outputs == (costs.sequence.crossing[number + 1],)
        assert node.inputs == ((nodes[number - 1].name,) if number else ())
    assert len(nodes) == len(module.blocks) + 1, "the loss comes last"


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    several = files.graph_paths(tmp_path / "graph.txt", ["a10", "a100"])
    assert [path.name for path in several.values()] == ["graph_a10.txt", "graph_a100.txt"]
    (tmp_path / "graph_a10.txt").touch()
    with pytest.raises(OutputError, match=r"graph_a10.txt already exists; choose another name, or add overwrite=true"):
        check_free(several["a10"], "graph_output=FILE", replace=False)
    check_free(several["a10"], "graph_output=FILE", replace=True)
    with pytest.raises(OutputError, match="no folder"):
        check_free(tmp_path / "none" / "graph.txt", "graph_output=FILE", replace=False)
