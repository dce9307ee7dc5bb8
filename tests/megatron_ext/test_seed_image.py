"""The engine runs, with the same losses, on what the seed's container image has: Python 3.8 and torch 2.0.

Set TDPP_SEED_PYTHON to such an interpreter (`python3.8 -m venv old; old/bin/pip install torch==2.0.1 'numpy<1.25'`,
some GB): the test installs none itself. That the sources parse as Python 3.8 is tested everywhere.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.megatron_ext.engine_run import make_run

PYTHON = os.environ.get("TDPP_SEED_PYTHON")
LAYOUTS = {
    "uneven": "parallel.data=2 parallel.pipeline=2 parallel.partition=1-2 parallel.micro_batch_size=1",
    "tensor": "parallel.tensor=2 parallel.pipeline=2 parallel.data=1 parallel.sequence_parallel=true",
    "sharded": "parallel.data=2 parallel.pipeline=1 parallel.sharded_optimizer=true parallel.recompute=full",
    "zero-bubble": "parallel.data=1 parallel.pipeline=3 parallel.schedule=zb_h1 parallel.micro_batch_size=1",
}


@pytest.mark.skipif(PYTHON is None, reason="TDPP_SEED_PYTHON names no Python 3.8 with torch 2.0")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_python_38_and_torch_20_give_the_same_losses(tmp_path: Path, corpus: Path, layout: str) -> None:
    assert PYTHON is not None
    today = make_run(tmp_path / "today", corpus, *layout.split())
    assert today.go() == 0, today.stderr()
    seed = make_run(tmp_path / "seed", corpus, *layout.split())
    command = [PYTHON, "-m", "megatron_ext.worker", str(seed.run.plan), "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(seed.losses(), today.losses(), rtol=0, atol=1e-5)
