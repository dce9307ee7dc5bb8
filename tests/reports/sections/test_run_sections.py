"""What the page of a run says beside its timeline: utilisation, cost, memory, prediction, GPUs, what nodes said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from conf.run_folder.gpu_lines import GpuProcess, GpuReading, GpuSample, GpuTrouble, entry_text
from megatron_ext.contract.adaptive.config import AdaptConfig
from reports.facts.frames import Terms
from reports.facts.statistics import Statistics
from reports.readers.gpus import gpu_report
from reports.readers.megatron_log import Sizes
from reports.sections.expected_section import Took, expected_section
from reports.sections.stages_section import _iterations as slow_iterations
from reports.sources import Source
from tests.reports.conftest import Opener
from tests.reports.test_cli import Found, Line, report
from tests.support.reports.figures import course_of
from tests.support.reports.synthetic import PRICE_PER_HOUR, Shape, make_run

SHAPE = Shape(pipeline=2, data=2, ranks_per_node=2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, SHAPE)
    return folder


def test_a_deep_pipeline_of_one_replica_has_a_short_page(tmp_path: Path):
    """No column of zeros, such as the imbalance of one replica; tables of all stages are folded, and bars are low."""
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, Shape(pipeline=24, micro_batches=2, layers=24))
    report(run)
    page = (run / "report/index.html").read_text()
    stages = page.split("<h2>Stages</h2>")[1].split("</table>")[0]
    assert "bubble</th>" in stages
    assert "imbalance</th>" not in stages
    for title in ("Differences of all 24 stages", "Memory of all 24 stages"):
        assert f"<details><summary>{title}</summary>" in page
    heights = [int(height) for height in re.findall(r'"height": ?(\d+)', page)]
    assert max(heights) < 600


def with_config(run: Path, **changes: object) -> Path:
    config = json.loads((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(json.dumps(config | changes))
    return run


def row(run: Path, title: str, first: str) -> list[str]:
    """The cells of a row of a section's table, by its first cell."""
    section = (run / "report/index.html").read_text().split(f"<h2>{title}</h2>")[1].split("</section>")[0]
    section = re.sub(r'<span class="whole">(.*?)</span>', r"\1", section)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", one, re.DOTALL) for one in section.split("<tr>")]
    return next(cells for cells in rows if cells and cells[0] == first)


def test_utilisation_is_the_models_operations_over_the_peaks_of_all_gpus(run: Path):
    said, _ = report(run)
    tflops = 42.5  # median of the lines after the first
    assert re.search(rf"Model-FLOP utilisation\s+{tflops / 31.2:.1%}\s+of 125 TFLOP/s fp32 peak", said)


def test_a_model_without_tokens_has_samples_per_second(run: Path):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"samples_per_s": 12.5}
        del line["tokens_per_s"], line["tflops_per_rank"]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said, _ = report(run)
    assert re.search(r"Samples per second\s+12\.5", said)
    assert "Samples per second" in [
        chart["title"] for chart in course_of((run / "report/index.html").read_text())["charts"]
    ]
    assert "okens per second" not in said


def test_the_loss_is_the_last_that_is_known(run: Path):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for skipped, note in ((1, "mean up to iteration 2, none since"), (3, "")):
        for line in lines[-skipped:]:
            line |= {"loss": None, "skipped": 1}
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        said, _ = report(run)
        loss = f"{lines[1]['loss']:.4f}" if note else "–"
        assert re.search(rf"Loss\s+{loss}\s+{note}", said)


def test_cost_is_that_of_all_nodes(run: Path):
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    milliseconds = sum(line["elapsed_ms"] for line in metrics[1:]) / 2
    said, _ = report(run)
    assert f"${2 * PRICE_PER_HOUR:.2f}/h" in said
    assert f"${2 * PRICE_PER_HOUR * milliseconds / 3.6e6:,.4f} an iteration" in said


def test_cost_says_which_price_is_not_known(run: Path):
    config = json.loads((run / "config.yaml").read_text())
    del config["cluster"]["groups"]["g0"]["price_per_hour"]
    said, _ = report(with_config(run, **config))
    assert f"≥ ${PRICE_PER_HOUR:.2f}/h" in said
    assert "without g0 (price unknown)" in said


def test_differences_to_the_prediction_are_measured_less_predicted_and_add_up(run: Path):
    said, _ = report(run)
    assert "An iteration took" in said
    for stage in ("0", "1"):
        cells = row(run, "Predicted and measured", stage)[1:]
        numbers = [re.findall(r"-?[\d.]+", cell.replace(",", "").replace("−", " ")) for cell in cells]
        assert len(numbers) == 8
        for difference, seen, expected in ([float(one) for one in cell] for cell in numbers):
            assert difference == pytest.approx(seen - expected, abs=0.11)
        differences = [float(cell[0]) for cell in numbers]
        assert sum(differences[:-1]) == pytest.approx(differences[-1], abs=0.4)


def test_where_nothing_differs_no_term_is_called_the_largest(run: Path):
    prediction = Source.find(run.parent, str(run), Sizes()).read().prediction
    as_predicted = {stage: Terms.of_prediction(one.terms) for stage, one in enumerate(prediction.stages)}
    said = expected_section(prediction, as_predicted, Took(ms=prediction.iteration_s * 1e3))
    assert "as long as" in said
    assert "largest part" not in said
    assert "worst" not in said


def test_of_one_logged_line_the_prediction_is_compared_with_steady_iterations(run: Path):
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(json.dumps(json.loads(metrics[0]) | {"elapsed_ms": 1e6}) + "\n")
    said, _ = report(run)
    assert float(re.search(r"An iteration took ([\d,.]+) ms", said)[1].replace(",", "")) < 1e5


def test_memory_has_the_measured_peak_the_prediction_and_the_limit(run: Path):
    said, _ = report(run)
    cells = row(run, "Memory", "0")
    parts, (predicted, measured, limit, left) = [float(cell) for cell in cells[1:9]], map(float, cells[9:])
    assert sum(parts) == pytest.approx(predicted, abs=0.045)
    assert measured == round(SHAPE.peak_mib(1) / 1024, 2)
    assert (limit, left) == (22.2, pytest.approx(22.2 - measured, abs=0.011))
    assert f"Stage 0 is the fullest: it took {measured:.1f} of 22.2 GiB" in said


def test_a_configuration_that_cannot_be_read_costs_its_figures_and_nothing_else(
    run: Path, capsys: pytest.CaptureFixture
):
    (run / "config.yaml").write_text("a: b: c")
    said, _ = report(run)
    assert "no prediction, prices or peak rates: config.yaml cannot be read" in said
    assert "Predicted and measured" not in said
    assert "Stages" in said


def test_a_slow_rank_is_named_with_its_node(run: Path, tmp_path: Path):
    events = run / "events/rank-00003.bin"
    slow = tmp_path / "slow"
    make_run(slow / "tiny/20260101-000000-bbbb", Shape(pipeline=2, data=2, ranks_per_node=2, layers=16))
    events.write_bytes((slow / "tiny/20260101-000000-bbbb/events/rank-00003.bin").read_bytes())
    said, _ = report(run)
    assert "1 rank of 4 computed over 5% longer than the others of its stage" in said
    cells = row(run, "Stragglers", "3")
    assert cells[1:3] == ["g1-1", "1"]
    assert float(cells[5].strip("+%")) > 50


def test_the_table_of_many_nodes_is_folded(run: Path, tmp_path: Path):
    report(run)
    assert "<summary>Ranks and stages" not in (run / "report/index.html").read_text()
    many = tmp_path / "many/tiny/20260101-000000-bbbb"
    make_run(many, Shape(pipeline=17, ranks_per_node=1, layers=17, iterations=1, micro_batches=1))
    assert "Ranks and stages of 17 nodes" in report(many)[0]


def test_what_nodes_say_is_grouped_and_errors_come_before_warnings(run: Path):
    found = Found(
        mismatches=("node g0-0: says WORLD_SIZE 8, but 4 was submitted",),
        stderr=(Line("CUDA is gone", 4, ("g0-0", "g1-1")),),
        warnings=(Line("UserWarning: slow", 12, tuple(f"n{i}" for i in range(5))), Line("FutureWarning", 1)),
    )
    said, _ = report(run, lambda _: found)
    parts = ["says WORLD_SIZE 8", "Errors", "CUDA is gone", "13 warnings of 2 kinds", "n0, n1, n2 and 2 more"]
    places = [said.index(part) for part in parts]
    assert places == sorted(places)


def test_nodes_that_run_what_was_submitted_and_say_nothing_have_no_section(run: Path):
    assert "What the nodes say" not in report(run, lambda _: Found())[0]


def sample(index: int, utilisation: int | None, power: int | None, ours: bool = True) -> GpuSample:
    return GpuSample(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA A10",
        utilisation=utilisation,
        memory_used_mib=10_000 + index,
        memory_total_mib=22_731,
        power_w=power,
        power_limit_w=150,
        temperature_c=60 + index,
        processes=(GpuProcess(pid=1, memory_mib=1, ours=True),) if ours else (),
    )


def readings(*rows: tuple[GpuSample, ...]) -> str:
    return "".join(
        entry_text(GpuReading(unix=1_760_000_000 + 10 * number, host="h", number=number, interval_s=10, gpus=row))
        for number, row in enumerate(rows, 1)
    )


def test_gpus_are_summed_up_over_the_time_in_which_the_run_computed(run: Path):
    idle = (sample(0, 0, 20, ours=False), sample(1, 0, 20, ours=False))
    busy = (sample(0, 98, 140), sample(1, 40, 70))
    (run / "nodes/g0-0.gpu").write_text("cut off\n" + readings(idle, busy, busy) + "2026-11-21T22:02:10")
    (run / "nodes/g1-1.gpu").write_text(entry_text(GpuTrouble(unix=1_760_000_000, text="no GPU here")))
    said, _ = report(run)
    assert "2 GPUs, 69% utilised on average; the least utilised was GPU 1 of g0-0, at 40%." in said
    assert row(run, "GPUs", "g0-0")[1:] == ["1", "NVIDIA A10", "40", "70 of 150", "10,001 of 22,731", "61"]
    assert "g1-1: no GPU here" in said


def test_power_is_that_of_all_gpus_together():
    busy = (sample(0, 90, 100), sample(1, 70, 60))
    found = gpu_report({"a": readings(busy, busy), "b": readings((sample(5, 50, 40),), (sample(5, 50, 40),))})
    assert set(found.course["power_w"]) == {200}
    assert set(found.course["utilisation"]) == {70}
    assert len(found.uses) == 3


def test_what_slowed_a_gpu_is_counted_while_the_run_computed():
    hot = replace(sample(0, 98, 140), clocks=("hardware slowdown", "heat (hardware)"))
    idle = replace(sample(0, 0, 20, ours=False), clocks=("idle", "heat (hardware)"))
    capped = (replace(sample(0, 98, 140), clocks=("power cap",)),)
    found = gpu_report({"a": readings((idle,), (hot,), (sample(0, 98, 140),), capped, capped), "b": readings(capped)})
    assert found.throttled == {("a", 0): {"heat (hardware)": 0.25, "hardware slowdown": 0.25}}


def test_a_gpu_that_tells_nothing_or_is_lost_is_listed(run: Path):
    lost = GpuSample(index=0, uuid="GPU-0", name="NVIDIA A10", fault="GPU is lost")
    (run / "nodes/g0-0.gpu").write_text(readings((lost,)))
    said, _ = report(run)
    assert "No GPU reported its utilisation." in said
    assert row(run, "GPUs", "g0-0")[1:] == ["0", "NVIDIA A10", "–", "– of –", "– of –", "–", "GPU is lost"]


def test_of_several_gpus_the_lost_one_comes_first_and_the_others_have_no_fault(run: Path):
    lost = GpuSample(index=3, uuid="GPU-3", name="NVIDIA A10", fault="GPU is lost")
    (run / "nodes/g0-0.gpu").write_text(readings((sample(0, 98, 140), sample(1, 40, None), lost)))
    report(run)
    assert row(run, "GPUs", "g0-0")[1:] == ["3", "NVIDIA A10", "–", "– of –", "– of –", "–", "GPU is lost"]
    rows = (run / "report/index.html").read_text().split("<h2>GPUs</h2>")[1].split("</section>")[0].split("<tr>")
    assert [row.endswith("<td></td></tr>\n") for row in rows[2:4]] == [False, True]


def test_the_name_of_a_node_is_not_broken_at_its_hyphens(run: Path, open_page: Opener):
    long = tuple(f"gpu-rack-07-node-{number}" for number in range(4))
    judged = Found(stderr=(Line("RuntimeError: " + "no room for another tensor " * 30, 4, long),))
    report(run, lambda _: judged)
    page = open_page(run / "report/index.html", viewport={"width": 640, "height": 800})
    lines = page.locator("td .whole").evaluate_all("(all) => all.map((name) => name.getClientRects().length)")
    assert lines == [1] * 3


def test_what_a_run_decided_about_its_batch_is_drawn_over_samples_and_listed_with_the_reason(run: Path):
    report(run)
    assert "<h2>Adaptation</h2>" not in (run / "report/index.html").read_text()
    one = {"iteration": 2, "consumed_samples": 16, "before": 8, "shares_before": [1, 1], "learning_rate_factor": 1.4142}
    sizes = {
        "micro_batch_sizes_before": [2, 2],
        "micro_batch_sizes": [2, 6],
        "streams_before": [1, 1],
        "streams": [3, 1],
    }
    grown = sizes | {
        "global_batch_size": 16,
        "shares": [5, 1],
        "noise_scale": 33.3,
        "similarity": 0.11,
        "reason": "a < b",
    }
    kept = {"iteration": 3, "global_batch_size": 8, "shares": [1, 1], "noise_scale": None, "reason": "1 of 4"}
    (run / "decisions.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in (one | grown, one | kept, {"iteration": 4}))
    )
    report(run)
    page = (run / "report/index.html").read_text()
    assert row(run, "Adaptation", "2") == [
        "2",
        "16",
        "8 → 16",
        "1-1 → 5-1 of 2-2 → 2-6 samples in 1-1 → 3-1 streams",
        "1.414",
        "0.110",
        "33.3",
        "a &lt; b",
    ]
    assert "1 of 2 decisions did not change anything." in page
    assert Source.find(run.parent, str(run), Sizes()).read().record.micro_batch_numbers == 5 > SHAPE.micro_batches
    assert "decisions.jsonl: line 3 is damaged, or of another version of tdpp: it lacks consumed_samples" in page
    assert "Noise scale (samples) over samples" in page


def test_experts_are_drawn_by_layer_and_over_iterations(run: Path):
    report(run)
    assert "<h2>Experts</h2>" not in (run / "report/index.html").read_text()
    tables = ([[1.5, 0.5], [1.0, 1.0]], [[1.25, 0.75], [2.0, 0.0]], [[1.0], [1.0, 1.0]], [[None, 1.0]], [])
    lines = [json.dumps({"iteration": number, "loads": table}) for number, table in enumerate(tables, 1)]
    (run / "experts.jsonl").write_text("".join(f"{line}\n" for line in (*lines, "{")))
    report(run)
    page = (run / "report/index.html").read_text()
    section = page.split("<h2>Experts</h2>")[1].split("</section>")[0]
    by_layer, over = map(json.loads, re.findall(r'<script type="application/json">(.*?)</script>', section))
    assert by_layer["data"][0]["z"] == tables[1]
    assert "Load by layer and expert, iteration 2" in section
    assert [(one["name"], one["x"], one["y"]) for one in over["data"]] == [
        ("busiest", [1, 2], [1.5, 2.0]),
        ("idlest", [1, 2], [0.5, 0.0]),
    ]
    assert "experts.jsonl: line 3 and 3 more has no table of experts; ignored" in page


@pytest.mark.parametrize(("samples", "epochs"), [(400, None), (400, 5), (100, None)])
def test_of_a_batch_that_adapts_the_head_says_how_many_samples_were_trained(
    run: Path, samples: int, epochs: int | None
):
    plan, metrics = json.loads((run / "plan.json").read_text()), (run / "metrics.jsonl").read_text().splitlines()
    lines = [
        json.loads(line) | {"consumed_samples": 100, "global_batch_size": 20, "elapsed_ms": 50} for line in metrics
    ]
    plan["train"] |= {"samples": samples, "epochs": epochs}
    adapt = AdaptConfig("noise", 0.3, 8, 64, 10, 0.1, 4, "sqrt", rebalance=False)
    (run / "plan.json").write_text(json.dumps(plan | {"adapt": vars(adapt)}))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said, _ = report(run)
    head = "Samples 100 of 100" if samples == 100 else "Samples 100 of 400" if epochs is None else "Epoch 1.25 of 5"
    rest = "" if samples == 100 else " · the rest will take about 750 ms at 400.0 samples/s"
    assert f"{head} iteration {lines[-1]['iteration']}, last logged{rest} Loss" in " ".join(said.split())


def test_what_profilers_left_is_listed_with_the_iteration_that_it_shows(run: Path):
    report(run)
    assert "<h2>Profiles</h2>" not in (run / "report/index.html").read_text()
    captured = "nsys/g0-0.iteration-3.nsys-rep"
    for name in ("traces/rank-00002.iteration-3.json.gz", "traces/other.json.gz", "nsys/g0-0.nsys-rep", captured):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"")
    report(run)
    whole, traced = "<code>nsys/g0-0.nsys-rep</code>", "<code>traces/rank-00002.iteration-3.json.gz</code>"
    assert row(run, "Profiles", whole) == [whole, "node g0-0", "all", "Nsight Systems"]
    link = '<a href="timeline.html#iteration=3">3 in the timeline</a>'
    assert row(run, "Profiles", traced) == [traced, "rank 2", link, "ui.perfetto.dev"]
    captured = f"<code>{captured}</code>"
    assert row(run, "Profiles", captured) == [captured, "node g0-0", link, "Nsight Systems"]
    assert "other.json.gz" not in (run / "report/index.html").read_text()


def test_neither_a_larger_nor_a_smaller_batch_makes_an_iteration_slow():
    """Per sample a small one takes longer, since every iteration takes some time of its own."""
    batches = np.array([8.0] * 6 + [64.0] * 12)
    lengths = 50.0 + 2 * batches
    lengths[[3, 10]] *= 2
    figures = cast(
        Statistics,
        SimpleNamespace(
            samples=batches, steady=np.ones(18, bool), length_ns=1e6 * lengths, iterations=np.arange(1, 19)
        ),
    )
    assert slow_iterations(figures) == "2 iterations took over 1.5 times the median per sample: 4, 11."
