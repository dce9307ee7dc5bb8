"""Ranks with different software say so before they send each other anything."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_ext.contract.errors import EngineError, PeerLost
from megatron_ext.parallel import meeting

CPU = torch.device("cpu")


def told(store: dist.Store, versions: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each rank raises."""
    own = iter(versions)
    monkeypatch.setattr(meeting, "_versions", lambda device: next(own))

    def compare(rank: int) -> str:
        try:
            meeting.check_same_software(store, rank, len(versions), CPU)
        except EngineError as error:
            assert not isinstance(error, PeerLost)
            return str(error)
        return ""

    with ThreadPoolExecutor(len(versions)) as ranks:
        return list(ranks.map(compare, range(len(versions))))


def test_every_rank_tells_of_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    found = told(dist.HashStore(), ["NCCL 2.17.1", "NCCL 2.17.1", "NCCL 2.18.3"], monkeypatch)
    assert len(set(found)) == 1
    assert "NCCL 2.17.1 on" in found[0]
    assert "NCCL 2.18.3 on" in found[0]


def test_what_makes_nccl_send_otherwise_is_a_difference_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 17, 1))
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    plain = meeting._versions(torch.device("cuda"))
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    assert plain.endswith("NCCL 2.17.1")
    assert meeting._versions(torch.device("cuda")) == f"{plain}, NCCL_PROTO=Simple"


def test_equal_ranks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(dist.HashStore(), ["NCCL 2.17.1"] * 3, monkeypatch) == ["", "", ""]


def test_a_rank_that_does_not_come_is_told_as_lost() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(PeerLost, match=r"^comparing versions failed: "):
        meeting.check_same_software(store, 0, 2, CPU)


def test_on_gpus_nccl_is_compared_and_on_cpus_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 18, 1))
    assert meeting._versions(torch.device("cuda")).endswith(", NCCL 2.18.1")
    assert meeting._versions(CPU) == f"torch {torch.__version__}"
