"""What a node is made of is written beside its ranks' start."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.timeline import surroundings
from tests.support.megatron_ext.engine_run import EngineRun

SMI = """#!/bin/sh
[ "$1" = "--query-gpu=$FIELDS" ] || exit 9
echo "NVIDIA A10, GPU-1, 550.54, 94.02, Enabled, 1695 MHz, 6251 MHz, 1695 MHz, 150.00 W, Enabled, [N/A]"
"""


def test_a_run_notes_what_its_node_is_made_of(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run("parallel.data=1", "parallel.pipeline=1")
    assert run.go() == 0, run.stderr()
    noted = json.loads(run.run.node_machine("local-0").read_text())
    assert noted["kernel"] == platform.release()
    assert noted["packages"]["numpy"] == np.__version__
    assert (noted["gpus"], noted["driver"]) == ([], None)


def test_the_packages_are_those_that_python_finds() -> None:
    found = surroundings.packages(sys.path)
    for name in ("numpy", "hydra-core", "omegaconf"):
        assert found[name] == metadata.version(name)


def test_of_gpus_it_is_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("FIELDS", ",".join(surroundings.OF_A_GPU))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(surroundings, "GPU_S", 60.0)
    found = surroundings.surroundings(has_gpus=True)
    assert found["driver"] == "550.54"
    assert found["gpus"][0]["ecc.mode.current"] == "Enabled"
    assert found["gpus"][0]["clocks.max.sm"] == "1695 MHz"


def test_a_driver_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexec sleep 60\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    assert surroundings.surroundings(has_gpus=True)["gpus"] == []
    assert time.monotonic() - began < 20
