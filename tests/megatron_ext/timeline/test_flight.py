"""What NCCL's watchdog has written of a message that did not end, in torch's own format."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.timeline import flight

RECORDED = """
import pickle, sys
from pathlib import Path
import torch
import torch.distributed as dist
from megatron_ext.timeline import flight
flight.record(Path(sys.argv[1]))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
content = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
content["entries"][-1].update(profiling_name="nccl:all_reduce", retired=False, state="started")
content["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
Path(sys.argv[1] + "0").write_bytes(pickle.dumps(content))
"""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A file as the watchdog writes it: a real recording, but that gloo's last message ends."""
    subprocess.run([sys.executable, "-c", RECORDED, str(tmp_path / "flight-")], check=True)
    return tmp_path / "flight-0"


def test_the_message_that_has_not_ended_is_named(recording: Path) -> None:
    assert flight.of_file(recording) == "nccl:all_reduce number 3 of ranks [0, 1], started, has not ended"
    content = pickle.loads(recording.read_bytes())
    content["entries"][1].update(retired=False, is_p2p=True, p2p_seq_id=7, profiling_name="nccl:recv 0<-1")
    recording.write_bytes(pickle.dumps({**content, "pg_config": {}}))
    told = flight.of_file(recording)
    assert told == "nccl:recv 0<-1 number 7 of group 0 default_pg, scheduled, has not ended"


def test_what_is_no_recording_tells_nothing_and_runs_nothing(recording: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> object:
            return os.mkdir, (str(tmp_path / "made"),)

    whole = recording.read_bytes()
    for content in (b"", whole[:100], pickle.dumps({"entries": [Evil()]}), pickle.dumps([]), b"{}"):
        recording.write_bytes(content)
        assert flight.of_file(recording) == ""
    assert not (tmp_path / "made").exists()
    assert flight.of_file(tmp_path / "none") == ""


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "0")
    flight.record(tmp_path)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "0"
