"""What megatron.core, or a checkout of Megatron-LM, asks of CUDA by the name of the device is on the CPU.

make test-megatron
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ext.core import on_cpu
from tests.support.megatron_ext.another_process import in_another_process

pytest.importorskip("megatron", reason="megatron-core is not installed")

WAYS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "empty": lambda _, device: torch.empty(2, device=device),
    "full_like": lambda old, device: torch.full_like(old, 2.0, device=device),
    "asarray": lambda _, device: torch.asarray([1], device=device),
    "triu_indices": lambda _, device: torch.triu_indices(2, 2, device=device),
    "pinned": lambda _, device: torch.zeros(2, device=device, pin_memory=True),
    "new_zeros": lambda old, device: old.new_zeros(2, device=device),
    "new_tensor": lambda old, device: old.new_tensor([1.0], device=device),
    "of a parameter": lambda old, device: nn.Parameter(old).new_full((2,), 1.0, device=device),
    "to": lambda old, device: old.to(device),
    "to, by name": lambda old, device: old.to(device=device, dtype=torch.half),
    "cuda": lambda old, _: old.cuda(),
    "made in a module": lambda _, device: nn.Linear(2, 2, device=device).weight,
    "moved in a module": lambda _, device: nn.Linear(2, 2).to(device).weight,
}


def test_what_makes_or_moves_a_tensor_finds_the_cpu(tmp_path: Path) -> None:
    def devices() -> dict[str, set[str]]:
        on_cpu.begin()
        old = torch.ones(2)
        asked = ("cuda", "cuda:0", torch.device("cuda", 0), torch.cuda.current_device())
        return {name: {str(way(old, one).device) for one in asked} for name, way in WAYS.items()}

    assert in_another_process(devices, tmp_path / "devices") == {name: {"cpu"} for name in WAYS}


def test_an_optimizer_is_told_the_types_of_cuda(tmp_path: Path) -> None:
    def types() -> list[str]:
        on_cpu.begin()
        return [torch.ones(2).type(), torch.ones(2).half().type(), str(torch.ones(2).type(torch.bfloat16).dtype)]

    assert in_another_process(types, tmp_path / "types") == [
        "torch.cuda.FloatTensor",
        "torch.cuda.HalfTensor",
        "torch.bfloat16",
    ]
