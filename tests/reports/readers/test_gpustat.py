"""The GPUs of a job that gpustat looked at are on its page."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.run_folder.gpu_lines import GpuSample
from launch.commands.report import main
from reports.readers.gpus import readings
from tests.support.reports.legacy import Job, calls, job_info, log

TEXT = """\
n060                Wed Jun 14 16:08:12 2023  470.82.01
[0] NVIDIA A10       | 49'C,   0 % |     0 / 22731 MB |
[1] NVIDIA A10       | 50'C,  97 % | 11468 / 22731 MB | root(11449M)
n060                Wed Jun 14 16:08:14 2023  470.82.01
[0] NVIDIA A10       | 61'C,  40 % |  4020 / 22731 MB | root(4001M)
[1] NVIDIA A10       | ??'C,  ?? % |    ?? /    ?? MB | (Not Supported)
"""


def test_every_reading_is_there_with_its_time_and_gpus():
    first, second = readings(TEXT)
    assert (first.host, second.unix - first.unix, first.interval_s) == ("n060", 2, 2)
    assert [(gpu.index, gpu.name, gpu.utilisation, gpu.memory_used_mib) for gpu in first.gpus] == [
        (0, "NVIDIA A10", 0, 0),
        (1, "NVIDIA A10", 97, 11468),
    ]
    assert second.gpus[1].utilisation is None


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        pytest.param("[0] A10 | 49'C,   7 % |     5 / 22731 MB", (49, 7, None, None, 5), id="no-processes"),
        pytest.param("[0] A10 | 49°C,   7 % |     5 / 22731 MB | x", (49, 7, None, None, 5), id="newer"),
        pytest.param("[0] A10 | 49°C,  30 %,   7 % |     5 / 22731 MB |", (49, 7, None, None, 5), id="fan"),
        pytest.param("[0] A10 | 49'C,   7 %,   70 / 150 W |     5 / 22731 MB |", (49, 7, 70, 150, 5), id="power"),
        pytest.param(
            "\x1b[36m[0]\x1b(B\x1b[m A10 | 49'C,   7 % |     5 / 22731 MB |", (49, 7, None, None, 5), id="colour"
        ),
    ],
)
def test_a_gpus_line_is_read_whatever_gpustat_was_asked_for(line: str, figures: tuple[int | None, ...]):
    def told(gpu: GpuSample) -> tuple[int | None, ...]:
        return gpu.temperature_c, gpu.utilisation, gpu.power_w, gpu.power_limit_w, gpu.memory_used_mib

    (reading,) = readings(f"n060  Wed Jun  4 16:08:12 2023  470\n{line}\n")
    assert [told(gpu) for gpu in reading.gpus] == [figures]


@given(st.text(alphabet="[]0123456789|'°C %,/MBW?\n\x1bWedJun: ", max_size=200), st.integers(0, len(TEXT)))
def test_what_is_no_reading_is_passed_over(noise: str, at: int):
    found = readings(TEXT[:at] + noise + "\n" + TEXT)
    assert [gpu.utilisation for gpu in found[-1].gpus] == [40, None]


def test_the_gpus_of_a_job_are_on_its_page_and_name_its_nodes(tmp_path: Path):
    job = Job(data=2)
    (tmp_path / "n060.out").write_text(job_info(job, 0) + log(job, calls(job)))
    (tmp_path / "n060.gpu").write_text(TEXT)
    main([str(tmp_path)])
    summary = (tmp_path / "report/index.html").read_text()
    assert "on 1 node (4 NVIDIA A10)" in summary
    assert "<h2>GPUs</h2>" in summary
    assert "2 GPUs, 58% utilised on average; the least utilised was GPU 0 of n060, at 20%" in summary


def test_without_its_headers_gpustats_readings_are_all_there_but_for_their_times(tmp_path: Path):
    bare = "".join(line for line in TEXT.splitlines(keepends=True) if line.startswith("["))
    assert [[gpu.utilisation for gpu in one.gpus] for one in readings(bare)] == [[0, 97], [40, None]]
    one_gpu = "".join(line for line in bare.splitlines(keepends=True) if line.startswith("[0]"))
    assert [[gpu.utilisation for gpu in one.gpus] for one in readings(one_gpu)] == [[0], [40]]
    job = Job(data=2)
    (tmp_path / "n060.out").write_text(job_info(job, 0) + log(job, calls(job)))
    (tmp_path / "n060.gpu").write_text(bare)
    main([str(tmp_path)])
    summary = (tmp_path / "report/index.html").read_text()
    assert "2 GPUs, 58% utilised on average; the least utilised was GPU 0 of n060, at 20%" in summary
    assert "The readings have no times" in summary
    assert "Power of all GPUs" not in summary
