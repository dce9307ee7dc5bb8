"""What is named as a file and is none is refused at once, whatever it is."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.run_folder.run_files import read_bytes
from megatron_ext import hf
from megatron_ext.checkpoints import safetensors
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular

ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", ODD)
def test_nothing_waits_for_what_is_no_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ODD[kind](path)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(path)
    with pytest.raises(EngineError, match="not a regular file"):
        safetensors.read(path)


def test_weights_that_a_pipe_would_bring_are_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert hf.main(["import", str(tmp_path / "pipe.safetensors"), str(tmp_path / "made")]) == 1
    assert "pipe.safetensors: cannot be read: not a regular file" in capsys.readouterr().err


def test_a_file_is_read_up_to_what_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    assert read_regular(tmp_path / "a", 10) == bytes(10)
    with pytest.raises(OSError, match="it has 10 bytes, more than 9"):
        read_regular(tmp_path / "a", 9)


@pytest.mark.parametrize("read", [read_regular, read_bytes], ids=["engine", "conf"])
def test_a_small_file_takes_little_memory(read: Callable[[Path], bytes], tmp_path: Path) -> None:
    """Ranks read their plan under `ulimit -v`, too."""
    (tmp_path / "small").write_bytes(b"a" * 3_000_000)
    tracemalloc.start()
    try:
        assert len(read(tmp_path / "small")) == 3_000_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
