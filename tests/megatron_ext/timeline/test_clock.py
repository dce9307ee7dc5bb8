"""Clocks of ranks on different hosts are compared with rank 0's."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.contract.events import NAMES
from megatron_ext.parallel import meeting
from megatron_ext.timeline.event_files import EventBuffer, EventFile
from megatron_ext.timeline.recorder import Recorder, begin_events
from tests.megatron_ext.engine.test_parts import RECORD
from tests.support.megatron_ext.engine_run import make_run

HOSTS = ["a", "a", "b", "c"]


def rank_main(rank: int, port: int, folder: Path, run: Path, corpus: Path) -> None:
    plan = make_run(run, corpus, "parallel.data=4", "parallel.pipeline=1").plan
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    socket.gethostname = lambda: HOSTS[rank]
    begin_events(folder / f"{rank}.bin", plan, plan.ranks[rank])
    buffer = EventBuffer()
    meeting.align_clocks(Recorder(buffer), store, "begin")
    EventFile(folder / f"{rank}.bin", buffer).write(last=True)
    dist.destroy_process_group()


def test_every_rank_learns_its_offset_and_how_uncertain_it_is(tmp_path: Path, corpus: Path) -> None:
    ports, told = os.pipe()
    children = []
    for rank in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(rank, int(os.read(ports, 5)), tmp_path, tmp_path / f"run{rank}", corpus)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    # Its threads may hold a lock of the C library at any time, which a process that is forked then has locked for ever.
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(told, f"{server.port:05}".encode() * 4)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    del server
    for rank, host in enumerate(HOSTS):
        raw = (tmp_path / f"{rank}.bin").read_bytes()
        (record,) = np.frombuffer(raw[12 + int.from_bytes(raw[8:12], "little") :], RECORD)
        assert NAMES[record["name"]] == "clock"
        # All ranks share this machine's clock, so the true offset is 0.
        offset = record["end_ns"] - record["start_ns"]
        if host == HOSTS[0]:
            assert (offset, record["peer"]) == (0, 0)
        else:
            assert 0 < record["peer"] < 50_000_000
            assert abs(offset) <= record["peer"]
