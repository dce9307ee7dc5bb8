"""docs/pipedream-experiments.md: its plans are those of the files, its commands run, its bytes are what is counted."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from conf.compose import compose
from launch.cli import main
from megatron_ext.contract.models.counts import parameter_count
from tests.support import ROOT

PAGE = (ROOT / "docs" / "pipedream-experiments.md").read_text(encoding="utf-8")
MODELS = ("vgg16", "alexnet", "resnet50", "gnmt8", "gnmt16")
EPOCH = ["train.epochs=2", "train.lr_warmup_iterations=5"]


@pytest.mark.parametrize("model", MODELS)
def test_the_page_shows_the_plans_of_the_files(model: str) -> None:
    (row,) = re.findall(rf"^\| `{model}` \| (.*) \|$", PAGE, re.MULTILINE)
    for workers, cell in zip((4, 16), row.split(" | "), strict=True):
        found = compose([f"experiment=pipedream/{model}_{workers}_pipedream"]).parallel
        replicas = f"`{found.replicas}`" if found.replicas else "straight"
        assert cell == f"{replicas}, cut `{found.partition}`"


@pytest.mark.slow
def test_the_commands_of_the_page_run_and_their_runs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = PAGE[PAGE.index("## On this machine") : PAGE.index("These commands do the same on a small scale")]
    commands = [line.split()[1:] for line in shown.splitlines() if line.startswith("    tdpp ")]
    assert [words[0] for words in commands] == ["data", "profile", "launch", "launch", "launch", "report"]
    for words in commands:
        few = EPOCH if words[0] == "launch" else ["seconds=0.02"] if words[0] == "profile" else []
        assert main([*words, *few]) == 0
    assert Path(capsys.readouterr().out.splitlines()[-1]).samefile("runs/comparison.html")
    compared = Path("runs/comparison.html").read_text(encoding="utf-8")
    sections = {
        title: rows(text) for title, text in re.findall(r"<h2>([^<]*)</h2>(.*?)</section>", compared, re.DOTALL)
    }
    for title in (
        "Time to quality",
        "Quality",
        "Throughput",
        "Bytes sent per sample",
        "Memory and versions",
        "Depth",
    ):
        assert title in sections
    assert "Published" not in sections
    dp, *pipelines = sections["Bytes sent per sample"]
    assert dp[1:] == ["0 B", "0 B", "10.17 kB", "10.17 kB", "2.54 kB"]
    assert " ".join(dp[1:]) in " ".join(PAGE.split())
    assert [row[1:3] for row in pipelines] == [["512 B", "512 B"]] * 2
    assert [row[1:3] for row in sections["Depth"]] == [["0-0", "1-1"], ["1-0", "2-1"]]
    assert all("–" not in row[:5] for row in sections["Throughput"])


def rows(text: str) -> list[list[str]]:
    body = text[text.find("<tbody>") :]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", body)]
    return [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in cells]


def test_the_bytes_of_vgg16_follow_from_its_weights() -> None:
    dp, pipeline = (compose([f"experiment=pipedream/vgg16_16_{kind}"]) for kind in ("dp", "pipedream"))
    weights = 4 * parameter_count(dp.model.sized(1))
    samples = dp.parallel.global_batch_size
    convolutions = weights - 4 * (25088 * 4096 + 4096 * 4096 + 4096 * 1000 + 4096 + 4096 + 1000)
    of_a_round = 15 * pipeline.parallel.micro_batch_size
    with_dp, cut = 2 * 15 * weights / samples, 2 * 4 * 25088
    with_pipeline = cut + 2 * 14 * convolutions / of_a_round
    text = " ".join(PAGE.split())
    assert f"{with_dp / 1e6:.1f} MB for a sample with data parallelism and {with_pipeline / 1e6:.1f} MB" in text
    assert f"{1 - with_pipeline / with_dp:.0%}".replace("%", " % less") in text
    assert f"all but {cut / 1e6:.1f} MB" in text
