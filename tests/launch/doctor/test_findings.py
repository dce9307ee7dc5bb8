"""What nodes and ranks of `tdpp doctor` write, and what is said where it is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from launch.doctor.findings import read_findings
from tests.support.launch.live import TWO_NODES
from tests.support.launch.run_folders import Case, ended
from tests.support.megatron_ext.engine_run import make_corpus

NODE = {"host": "n1", "python": "3.8.10", "cpus": 4, "files": {}, "maps": {}, "disk": 1, "shared_memory": None}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = Case([ended(1), None]).make(tmp_path / "tiny" / "1-1")
    experiment = compose([*TWO_NODES, f"data.prefix={make_corpus(tmp_path)}"])
    made.doctor_rank(0).parent.mkdir()
    made.write_json(made.plan, make_plan(experiment, made.name).as_json())
    made.write_json(
        made.doctor_node("local-0"), {**NODE, "address": ["10.0.0.1", 4711], "exit_codes": {"0": 0, "1": -9}}
    )
    made.write_json(made.doctor_rank(0), {"stage": "done"})
    return made


def test_a_node_has_what_its_ranks_found(run: RunDir) -> None:
    (node,) = read_findings(run)
    assert (node.address, node.wanted) == ("10.0.0.1", 2)
    assert [(rank.rank, rank.stage, rank.exit_code) for rank in node.ranks] == [(0, "done", 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "is not a JSON object"),
        ({"address": 5}, "address"),
        ({"address": [5]}, "address"),
        ({"exit_codes": []}, "exit_codes"),
        ({"cpus": "4"}, "cpus"),
    ],
)
def test_a_damaged_file_of_a_node_is_named(run: RunDir, change: dict[str, Any] | None, message: str) -> None:
    path = run.doctor_node("local-0")
    path.write_text(json.dumps([1] if change is None else {**json.loads(path.read_text()), **change}))
    with pytest.raises(RunFolderError, match=f"^{path} is damaged.*{message}"):
        read_findings(run)


@pytest.mark.parametrize("content", [[1], 5, {"stage": 3}, {}])
def test_a_damaged_file_of_a_rank_is_named(run: RunDir, content: object) -> None:
    run.write_json(run.doctor_rank(0), content)
    with pytest.raises(RunFolderError, match=f"^{run.doctor_rank(0)} is damaged"):
        read_findings(run)
