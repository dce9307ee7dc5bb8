"""An update of the weights is as few kernels as torch's own fused one, however many parameters there are, and the host
waits once in it: for the norm, and not for the update."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema.experiment import Precision
from fasop.costs.sizes import ADAM_BYTES
from tests.cuda.test_stand_in import ran
from tests.support.cuda.machine import Machine, counts

PROGRAM = """
    import ctypes, os, sys, torch
    from dataclasses import replace
    from torch import nn
    from megatron_ext.contract.train_config import Precision, TrainConfig
    from megatron_ext.engine.gradients.flat import FlatWeights
    from megatron_ext.engine.optimizer.optimizer import DataGroup, Optimizer
    from megatron_ext.timeline.recorder import Recorder
    from tests.support.cuda.accesses import Accesses

    usual = TrainConfig(
        iterations=4, seed=1, lr=1e-4, min_lr=0.0, lr_decay_iterations=4, weight_decay=0.1, precision=Precision.bf16
    )
    train = replace(usual, **{options})
    mark = ctypes.CDLL(None).standin_mark

    def steps(name, step):
        for number in range(3):
            mark(b"begin %d" % (name + number))
            step()
            mark(b"end %d" % (name + number))

    for layers in (4, 64):
        kinds = [(nn.LayerNorm, 64), (nn.Linear, 64, 192), (nn.Linear, 64, 64), (nn.Linear, 64, 256)]
        model = nn.Sequential(*(kind(*sizes) for _ in range(layers) for kind, *sizes in kinds))

        plain = [nn.Parameter(parameter.detach().clone().cuda()) for parameter in model.parameters()]
        for parameter in plain:
            parameter.grad = torch.zeros_like(parameter)
        adam = torch.optim.AdamW(plain, lr=1e-4, fused=True)
        steps(1000 + layers, lambda: (torch.nn.utils.clip_grad_norm_(plain, 1.0), adam.step()))

        dtype = {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}}[train.precision]
        flat = FlatWeights([*model.named_parameters()], dtype, torch.device("cuda"))
        elsewhere = [flat.where(one) for one in flat.parameters.values() if one.dim() < 2] if {shared} else []
        optimizer = Optimizer(flat, train, None, DataGroup(1, 0, None), False, elsewhere)
        steps(2000 + layers, lambda: optimizer.step(Recorder(None)))
        with Accesses():
            steps(3000 + layers, lambda: optimizer.step(Recorder(None)))
"""
NUMEL_OF_LAYER = 2 * 64 + 64 * (192 + 64 + 256) + 192 + 64 + 256


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        pytest.param({}, False, id="bf16"),
        pytest.param({"precision": "fp32"}, False, id="fp32"),
        pytest.param({"precision": "fp16"}, False, id="fp16"),
        pytest.param({"precision": "fp16", "loss_scaler": "logmax", "ema": 0.9}, False, id="fp16-logmax-averaged"),
        pytest.param({"clip_grad": 0.0}, False, id="unclipped"),
        pytest.param({"optimizer": "adam"}, False, id="adam"),
        pytest.param({"optimizer": "sgd"}, False, id="sgd"),
        pytest.param({}, True, id="tensor-group"),
    ],
)
def test_an_update_is_the_plain_loops_kernels_and_few_more(
    tmp_path: Path, options: dict[str, object], shared: bool
) -> None:
    ran(tmp_path, PROGRAM.format(options=options, shared=shared))
    (log,) = Machine(2, tmp_path / "machine").logs()
    for layers in (4, 64):
        plain, own = counts(log, 1002 + layers), counts(log, 2002 + layers)
        assert sum(plain.kernels.values()) > 0
        assert sum(own.kernels.values()) <= sum(plain.kernels.values()) + 30, own.kernels
        assert sum(own.waits.values()) == 1, own.waits


@pytest.mark.parametrize("precision", Precision)
def test_an_update_moves_the_bytes_that_are_predicted(tmp_path: Path, precision: Precision) -> None:
    ran(tmp_path, PROGRAM.format(options={"precision": precision.value}, shared=False))
    (log,) = Machine(2, tmp_path / "machine").logs()
    found = counts(log, 3002 + 64).traffic / (64 * NUMEL_OF_LAYER)
    assert found == pytest.approx(ADAM_BYTES[precision], rel=0.01)
