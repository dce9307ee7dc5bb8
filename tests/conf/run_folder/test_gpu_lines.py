"""nodes/<node>.gpu: the seed's lines for people, and nothing lost for programs, wherever the file is cut."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.run_folder.gpu_lines import GpuEntry, GpuProcess, GpuReading, GpuSample, GpuTrouble, entries, entry_text
from tests.support import ROOT

IDLE = GpuSample(
    index=0,
    uuid="GPU-5f1c0c6c-8a8c-9d3e-1f2a-0123456789ab",
    name="NVIDIA A10",
    utilisation=0,
    memory_used_mib=0,
    memory_total_mib=22731,
    power_w=21,
    power_limit_w=150,
    temperature_c=49,
    processes=(),
)
BUSY = replace(
    IDLE,
    index=1,
    utilisation=93,
    memory_used_mib=11468,
    power_w=148,
    processes=(
        GpuProcess(pid=52046, memory_mib=11449, ours=True),
        GpuProcess(pid=7, memory_mib=None, ours=False),
        GpuProcess(pid=8, memory_mib=12, ours=None),
    ),
)
MUTE = GpuSample(index=2, uuid="GPU-2", name="NVIDIA A100-SXM4-40GB", fault="GPU is lost")
READING = GpuReading(unix=1_700_000_000, host="n060", number=13, interval_s=10, gpus=(IDLE, BUSY, MUTE))
TROUBLE = GpuTrouble(unix=1_700_000_000, text="no GPU on n060: Driver Not Loaded")


def time(unix: int) -> str:
    return datetime.fromtimestamp(unix).astimezone().isoformat()


def test_a_reading_is_a_time_and_the_seeds_line_for_each_gpu() -> None:
    """The seed's: `[0] NVIDIA A10       | 49'C,   0 % |     0 / 22731 MB |`."""
    assert entry_text(replace(READING, gpus=(IDLE, replace(BUSY, temperature_c=101)))) == (
        f"{time(READING.unix)} n060: 2 GPUs, reading 13, every 10 s\n"
        "[0] NVIDIA A10       | 49'C,   0 % |     0 / 22731 MB |  21 / 150 W | - | "
        "GPU-5f1c0c6c-8a8c-9d3e-1f2a-0123456789ab\n"
        "[1] NVIDIA A10       |101'C,  93 % | 11468 / 22731 MB | 148 / 150 W | 52046(11449M) !7(??M) ?8(12M) | "
        "GPU-5f1c0c6c-8a8c-9d3e-1f2a-0123456789ab\n"
    )


def test_what_holds_clocks_down_stands_behind_the_uuid_and_in_older_files_nothing() -> None:
    held = replace(BUSY, clocks=("power cap", "heat (hardware)"), fault="GPU is lost")
    written = entry_text(replace(READING, gpus=(replace(IDLE, clocks=()), held, BUSY)))
    free, slow, older = written.splitlines()[1:]
    assert free.endswith(f"{IDLE.uuid} | clocks: -")
    assert slow.endswith(f"{IDLE.uuid} | clocks: power cap, heat (hardware) | GPU is lost")
    assert older.endswith(IDLE.uuid)
    (reading,) = entries(written)
    assert isinstance(reading, GpuReading)
    assert [gpu.clocks for gpu in reading.gpus] == [(), ("power cap", "heat (hardware)"), None]
    assert reading.gpus[1].fault == "GPU is lost"


def test_what_a_gpu_does_not_tell_is_no_number() -> None:
    assert entry_text(replace(READING, gpus=(MUTE,))).splitlines()[1] == (
        "[2] NVIDIA A100-SXM4-40GB | ??'C,  ?? % |    ?? /    ?? MB |  ?? /  ?? W | ?? | GPU-2 | GPU is lost"
    )


def test_a_trouble_is_one_line_however_it_was_told() -> None:
    assert entry_text(replace(TROUBLE, text="no\n GPU  here\n")) == f"{time(TROUBLE.unix)} no GPU here\n"


NUMBERS = st.none() | st.integers(0, 10**6)
WORDS = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="-_./"), min_size=1, max_size=40)
TEXTS = st.lists(WORDS, min_size=1, max_size=5).map(" ".join)
PROCESSES = st.builds(
    GpuProcess, pid=st.integers(0, 2**22), memory_mib=NUMBERS, ours=st.sampled_from([True, False, None])
)
SAMPLES = st.builds(
    GpuSample,
    index=st.integers(0, 15),
    uuid=WORDS,
    name=TEXTS,
    utilisation=NUMBERS,
    memory_used_mib=NUMBERS,
    memory_total_mib=NUMBERS,
    power_w=NUMBERS,
    power_limit_w=NUMBERS,
    temperature_c=NUMBERS,
    processes=st.none() | st.lists(PROCESSES, max_size=3).map(tuple),
    energy_j=st.none() | st.integers(0, 10**12),
    fault=st.none() | TEXTS,
)
TIMES = st.integers(0, 2**32)
READINGS = st.builds(
    GpuReading,
    unix=TIMES,
    host=WORDS,
    number=st.integers(1, 10**6),
    interval_s=st.integers(1, 3600),
    gpus=st.lists(SAMPLES, min_size=1, max_size=4).map(tuple),
)
TROUBLES = st.builds(GpuTrouble, unix=TIMES, text=TEXTS)
ENTRIES = st.lists(READINGS | TROUBLES, max_size=4)


@given(ENTRIES)
def test_what_is_written_is_read_again(written: list[GpuEntry]) -> None:
    assert list(entries("".join(map(entry_text, written)))) == written


@given(ENTRIES, st.integers(0, 4000))
def test_a_file_cut_anywhere_loses_at_most_what_was_cut(written: list[GpuEntry], length: int) -> None:
    text = "".join(map(entry_text, written))
    found = list(entries(text[:length]))
    assert found == written[: len(found)]
    whole = next(n for n in range(len(written), -1, -1) if len("".join(map(entry_text, written[:n]))) <= length)
    assert len(found) == whole


@given(st.lists(READINGS, min_size=1, max_size=3), st.integers(0, 400))
def test_the_end_of_a_file_is_enough_for_what_is_whole_in_it(written: list[GpuReading], start: int) -> None:
    text = "".join(map(entry_text, written))
    found = list(entries(text[start:]))
    assert found == written[len(written) - len(found) :]


@given(ENTRIES, st.integers(0, 4000), st.integers(1, 5))
def test_the_last_entries_are_those_of_all(written: list[GpuEntry], length: int, last: int) -> None:
    text = "".join(map(entry_text, written))[:length]
    assert entries(text, last) == entries(text)[-last:]


@pytest.mark.parametrize(
    "cut",
    [
        entry_text(READING)[:-1],
        entry_text(READING)[:-60],
        "".join(entry_text(READING).splitlines(keepends=True)[:2]),
        f"{time(0)} n060: 4 GPUs, rea",
    ],
    ids=["without its end", "in a GPU", "between two GPUs", "in the head"],
)
def test_a_reading_that_was_cut_off_is_left_out_and_those_after_it_are_not(cut: str) -> None:
    found = entries(f"{entry_text(READING)}{cut}\n{entry_text(READING)}")
    assert [entry for entry in found if isinstance(entry, GpuReading)] == [READING] * (3 if cut.endswith("lost") else 2)


@pytest.mark.parametrize(
    "line",
    ["", "[0] NVIDIA A10", "\0\0\0", "2026-99-99T00:00:00+00:00 n060: 1 GPU, reading 1, every 10 s", "12:00 hello"],
)
def test_lines_of_others_are_passed_over(line: str) -> None:
    assert entries(f"{line}\n{entry_text(READING)}{line}\n") == (READING,)


@pytest.mark.parametrize("page", ["formats.md", "gpus.md"])
def test_the_readings_in_the_documentation_are_readings(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    (shown,) = [
        entry for entry in entries("\n".join(map(str.strip, text.splitlines()))) if isinstance(entry, GpuReading)
    ]
    assert entry_text(shown).split("\n", 1)[1].strip() in "\n".join(map(str.strip, text.splitlines()))


def test_a_problem_keeps_its_words() -> None:
    assert entries(entry_text(TROUBLE)) == (TROUBLE,)
