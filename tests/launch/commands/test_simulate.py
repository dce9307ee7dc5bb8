"""`tdpp simulate` answers for every number of nodes, and says what is missing in one message."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from fasop.shares.performance import WeightSync, paces
from fasop.shares.public_files import read_cluster
from fasop.simulation.predict import predict
from launch.cli import main
from tests.support.fasop import quickstart

CLUSTER = """
name: priced
gpus:
  a: {name: A, memory_gib: 40, fp32_tflops: 19, fp16_tflops: 300, bf16_tflops: 300, memory_gb_per_s: 1500}
  b: {name: B, memory_gib: 24, fp32_tflops: 6, fp16_tflops: 80, bf16_tflops: 80, memory_gb_per_s: 400}
groups:
  fast: {gpu: a, count: 2, gpus_per_node: 2, intra_gbit_per_s: 128, intra_latency_us: 5, inter_gbit_per_s: 40,
         inter_latency_us: 20, price_per_hour: 9.0}
  slow: {gpu: b, count: 2, gpus_per_node: 2, intra_gbit_per_s: 64, intra_latency_us: 5, inter_gbit_per_s: 10,
         inter_latency_us: 20, price_per_hour: 1.0}
"""
ADAPTS = ("adapt.rule=noise", "adapt.upper=512", "adapt.every=10", "noise=20,600")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    file = tmp_path / "priced.yaml"
    file.write_text(CLUSTER)
    plan = {"tensor": 1, "pipeline": 1, "data": 8, "global_batch_size": 16, "micro_batch_size": 2, "partition": "null"}
    return [
        *(f"cluster={file}", "model=xl", "model.layers=2", "train=gpt2", "train.precision=fp16", "train.samples=40000"),
        *(f"parallel.{key}={value}" for key, value in plan.items()),
    ]


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_batch_that_stays_takes_as_many_iterations_as_predicted(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = answered(capsys, *words)
    own = next(one for one in found["trainings"] if one["nodes"] == "fast*2+slow*2")
    assert own["iterations"] == 2500
    launched = [word for word in words if not word.startswith("train=")]
    experiment = compose([*launched, "train=gpt2", "container=none"])
    assert own["seconds"] == pytest.approx(2500 * predict(experiment).iteration_s, rel=1e-9)
    assert own["dollars"] == pytest.approx(own["seconds"] / 3600 * 20)


def test_every_number_of_nodes_is_played_and_the_front_is_the_one_of_brute_force(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.csv"
    found = answered(capsys, *words, *ADAPTS, "epoch=10000", f"csv={rows}")
    every = {one["nodes"]: (one["seconds"], one["dollars"]) for one in found["trainings"]}
    assert len(every) == 3 * 3 - 1
    assert found["quickest"] == min(every, key=every.__getitem__)
    assert found["cheapest"] == min(every, key=lambda name: every[name][1])
    ahead = {
        name
        for name, own in every.items()
        if not any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in every.values())
    }
    assert set(found["front"]) == ahead
    for one in found["trainings"]:
        assert [part["number"] for part in one["epochs"]] == [1, 2, 3, 4]
        assert sum(part["seconds"] for part in one["epochs"]) == pytest.approx(one["seconds"], rel=1e-9)
        assert one["epochs"][-1]["batch"] > 4 * one["epochs"][0]["batch"]
    with rows.open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 8 * 4


def test_an_elastic_training_is_no_longer_than_the_best_nodes_alone(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without restarts it takes what is best for each epoch."""
    more = ("epoch=2000", "elastic=time", "restart_s=0")
    found = answered(capsys, *words, *ADAPTS, *more)
    assert found["elastic"]["seconds"] <= 1.02 * min(one["seconds"] for one in found["trainings"])
    run = ("elastic.enabled=true", "elastic.by=time", "elastic.epoch=2000", "train.save_interval=10")
    dear = answered(capsys, *words, *ADAPTS, *run, "elastic.restart_s=1e6")
    assert len(dear["elastic"]["legs"]) == 1


def test_only_nodes_that_are_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, *words, *ADAPTS, "nodes=fast,slow*2+fast")
    assert {one["nodes"] for one in found["trainings"]} == {"fast", "slow*2+fast"}


def test_noise_that_an_earlier_run_measured(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "noise.csv"
    table.write_text("samples,noise_scale\n0,20\n40000,600\n")
    of_file = answered(capsys, *words, *ADAPTS[:-1], f"noise={table}")
    of_numbers = answered(capsys, *words, *ADAPTS)
    assert of_file["trainings"] == of_numbers["trainings"]
    run = tmp_path / "runs" / "demo" / "20261122-115451-1eb85f1e"
    run.mkdir(parents=True)
    line = {"before": 16, "global_batch_size": 16, "shares_before": [1], "shares": [1], "learning_rate_factor": 1.0}
    scales = [(100, None), (200, 20.0), (20000, 100.0)]
    (run / "decisions.jsonl").write_text(
        "".join(
            json.dumps({**line, "iteration": 1, "reason": "", "consumed_samples": at, "noise_scale": scale}) + "\n"
            for at, scale in scales
        )
    )
    for name in ("plan.json", "config.yaml"):
        (run / name).write_text("{}")
    of_run = answered(capsys, *words, *ADAPTS[:-1], "noise=demo", f"runs_dir={tmp_path / 'runs'}")
    assert any("ends after 20,000 of 40,000 samples" in note for note in of_run["notes"])
    assert of_run["trainings"] != of_numbers["trainings"]


def test_servers_of_jabas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounds = {"batch_size_lower_bound": "256", "batch_size_upper_bound": "8192", "similarity_target": "0.3"}
    file = quickstart.write(tmp_path, **bounds)
    length = ("train.epochs=9", "epoch=256000")
    found = answered(capsys, f"iidp={file}", *length, "adapt.rule=none")
    both = next(one for one in found["trainings"] if one["nodes"] == "node0+node1")
    assert both["seconds"] == pytest.approx(9000 * 0.17108, rel=1e-4)  # by IIDP's own answer
    adapted = answered(capsys, f"iidp={file}", *length, "adapt.rule=noise", "noise=200,5000", "prices=node0:12,node1:3")
    assert adapted["quickest"] == "node0+node1"
    assert adapted["trainings"][0]["seconds"] < both["seconds"]
    assert adapted["trainings"][0]["epochs"][-1]["batch"] > 1000


def test_servers_of_iidp_with_given_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = quickstart.write(tmp_path)
    words = (f"iidp={file}", "train.samples=512000", "parallel.global_batch_size=512", "parallel.micro_batch_size=32")

    def seconds(*more: str) -> dict[str, float]:
        return {one["nodes"]: one["seconds"] for one in answered(capsys, *words, "adapt.rule=none", *more)["trainings"]}

    free, solved, single = seconds(), seconds("parallel.streams=3*4-1*4"), seconds("parallel.streams=1")
    assert free == seconds("parallel.streams=auto")
    assert solved["node0+node1"] == pytest.approx(1000 * 0.30033, rel=1e-4)  # by IIDP's own answer
    assert solved["node0+node1"] == free["node0+node1"] < single["node0+node1"]
    (servers,) = (cluster.servers for cluster in [read_cluster(file)])
    of = [paces(read_cluster(file), server, 32, WeightSync.overlap)[0] for server in servers]
    least = min(max(of[0].seconds(n - 1), of[1].seconds(4 - n - 1)) for n in (1, 2, 3))
    assert single["node0+node1"] == pytest.approx(1000 * least, rel=1e-12)
    assert main(["simulate", *words, "parallel.streams=3-1*7"]) != 0
    assert "node0 gets 3-1-1-1" in capsys.readouterr().err
    assert main(["simulate", *words, "parallel.streams=8"]) != 0
    assert "has room for 4; give it fewer" in capsys.readouterr().err


WRONG = [
    (["noise=20", "adapt.rule=noise"], "give adapt.upper"),
    (["adapt.rule=noise", "adapt.upper=512"], "so it needs a forecast: noise=RUN"),
    (["noise=20"], "has no effect unless the batch adapts"),
    (["noise=1,2,3", *ADAPTS[:-1]], "has 3 numbers"),
    (["noise=-1", *ADAPTS[:-1]], "must be a number above 0"),
    (["noise=not_there.csv", *ADAPTS[:-1]], "cannot be read as a CSV file"),
    (["noise=not_there", *ADAPTS[:-1]], "no runs in"),
    (["nodes=fast*3"], "the plan has 2 nodes of group 'fast'"),
    (["nodes=*"], "must be sets of nodes"),
    (["elastic=time", *ADAPTS], "add epoch=N"),
    (["elastic=money"], "must be time or dollars"),
    (["restart_s=5"], "add elastic=time"),
    (["prices=a:1"], "applies only to iidp=FILE"),
    (["parallel.schedule_file=x.json"], "x.json"),
    (["train.load=somewhere"], "a simulation starts from the beginning"),
]


@pytest.mark.parametrize(("more", "message"), WRONG, ids=[" ".join(more) for more, _ in WRONG])
def test_what_is_wrong_is_said_in_one_message(
    words: list[str], capsys: pytest.CaptureFixture[str], more: list[str], message: str, tmp_path: Path
) -> None:
    assert main(["simulate", *words, f"runs_dir={tmp_path}", *more]) != 0
    out = capsys.readouterr()
    assert out.out == ""
    (line,) = [line for line in out.err.splitlines() if line.startswith("tdpp: error:")]
    assert message in line
