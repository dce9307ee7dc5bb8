"""Machines with GPUs that are not there, as NVML would tell of them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FAKE_NVML = HERE / "fake_nvml"


@dataclass(frozen=True)
class Machine:
    """A machine without GPUs, at first; for this process and those that it starts."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        """Hides what the machine really has."""
        self.monkeypatch.setitem(sys.modules, "pynvml", None)

    def nvml(self, *gpus: dict[str, Any], **state: Any) -> None:
        """Makes NVML importable."""
        self._tell("NVML_STATE", {"gpus": gpus, **state})
        spec = spec_from_file_location("pynvml", FAKE_NVML / "pynvml.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        self.monkeypatch.setitem(sys.modules, "pynvml", module)
        if str(FAKE_NVML) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            self.monkeypatch.setenv("PYTHONPATH", str(FAKE_NVML), prepend=os.pathsep)

    def _tell(self, name: str, state: dict[str, Any]) -> None:
        path = self.folder / name
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(state))
        partial.replace(path)
        self.monkeypatch.setenv(name, str(path))


def nvml_gpu(index: int, **values: object) -> dict[str, object]:
    """An A10 as NVML tells of it: bytes and milliwatts."""
    told = {
        "uuid": uuid(index),
        "name": "NVIDIA A10",
        "utilisation": 93,
        "memory": [11468 << 20, 23028 << 20],
        "power": 147_610,
        "limit": 150_000,
        "temperature": 61,
        "processes": [],
    }
    return told | values


def uuid(index: int) -> str:
    return f"GPU-{index:08d}-8a8c-9d3e-1f2a-0123456789ab"
