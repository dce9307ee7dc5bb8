"""A rank on a CPU tries no size for which its part of the host's memory is too small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.measuring import room
from megatron_ext.measuring.room import HostMemory, available_bytes

MIB = 2**20
CHILD = """
import json, sys
from megatron_ext.measuring.room import HostMemory, peak_bytes
mib, fixed = 2**20, 20
host = HostMemory(int(sys.argv[1]) * mib, ranks=3)
begun = peak_bytes()
host.begin(fixed * mib)
tried, said = [], None
try:
    for size in (1, 2, 4, 8, 16, 32, 64):
        host.require(size)
        tried.append(size)
        kept = bytearray(b"x") * ((fixed + 4 * size) * mib)
        host.tried(size)
        del kept
except MemoryError as error:
    said = str(error)
print(json.dumps([tried, said, (peak_bytes() - begun) / mib]))
"""


@pytest.mark.parametrize("may_mib", [60, 100, 160])
def test_what_is_expected_to_be_too_large_is_not_tried(may_mib: int) -> None:
    """In a process of its own: 20 MiB at any size, and 4 of each sample."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(may_mib)], check=True, capture_output=True, text=True, env=os.environ
    )
    tried, said, grown = json.loads(done.stdout)
    assert tried == [size for size in (1, 2, 4, 8, 16, 32, 64) if 20 + 4 * size <= may_mib]
    assert grown <= may_mib + 1
    assert "of this host's memory each of its 3 ranks may take" in said


def test_available_is_what_linux_says_and_no_more_than_a_group_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    assert 0 < available_bytes() <= 1024 * meminfo["MemTotal"]
    groups = tmp_path / "cgroup"
    job = groups / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    for folder, most in ((job, str(500 * MIB)), (job / "step_0", "max")):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{300 * MIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {100 * MIB}\n")
    own = tmp_path / "own"
    own.write_text("0::/slurm/job_7/step_0\n")
    monkeypatch.setattr(room, "GROUPS", groups)
    monkeypatch.setattr(room, "OWN_GROUPS", own)
    assert available_bytes() == 300 * MIB  # 500, of which 300 are used, but for 100 that are only cached


def test_a_group_of_version_1_limits_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "cgroup" / "memory" / "job"
    job.mkdir(parents=True)
    for name, value in (("memory.limit_in_bytes", 400 * MIB), ("memory.usage_in_bytes", 150 * MIB)):
        (job / name).write_text(f"{value}\n")
    (job / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {50 * MIB}\n")
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    monkeypatch.setattr(room, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(room, "OWN_GROUPS", own)
    assert available_bytes() == 300 * MIB


def test_nothing_is_known_of_sizes_before_one_was_tried() -> None:
    host = HostMemory(100 * MIB)
    host.begin(0)
    host.require(2**16)
    with pytest.raises(MemoryError, match=r"out of memory: .* GiB would be needed"):
        host.begin(200 * MIB)
        host.require(1)
