"""What is prepared for a day with a GPU runs there, with torch and numpy alone."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu import prepare, results
from tests.benchmarks.test_gpu_training import CASES, PROFILES
from tests.support.cuda.machine import Machine

WANTED = ["profile-tiny:profile", "tiny:ours", "tiny:plain"]


def test_a_call_of_the_day_measures_on_a_gpu_and_its_table_has_the_cards_name(tmp_path: Path) -> None:
    prepare.prepare(tmp_path / "day", {"tiny": CASES["tiny"]}, PROFILES)
    words = [tmp_path / "day", *WANTED, "--results", tmp_path / "results", "--minutes", "60"]
    ended = Machine(1, tmp_path / "machine").run("-m", "benchmarks.gpu_training", *words)
    assert ended.returncode == 0, ended.stderr
    records = results.read([tmp_path / "results"])
    assert [f"{one['case']}:{one['contender']}" for one in records] == WANTED
    assert not [one["failed"] for one in records if "failed" in one]
    for one in records[1:]:
        assert one["mib"]["max_reserved"] >= one["mib"]["max_allocated"] > 0
    noted, *_ = records
    assert noted["rank"]["device"] == noted["machine"]["device"] == "NVIDIA A100-SXM4-80GB"
    lines = results.page(records, "gpu.json", PROFILES, CASES)
    assert lines[0] == "# NVIDIA A100-SXM4-80GB"
    assert [line for line in lines if line.startswith("| tiny |") and line.count("|") == 9], lines
