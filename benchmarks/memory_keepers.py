"""python -m benchmarks.memory_keepers: what a checkpoint in the memory of two nodes costs a rank (train.save_memory).

A rank is held up while it copies its parts; a thread then sends the copy to the keepers of two nodes while training
goes on. Both are CPU seconds of the rank; the keepers are processes on this machine.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.header import digest_of, of_part
from megatron_ext.contract.kept import At, Keeper
from megatron_ext.contract.run_files import RunFiles

MATRICES = 16
ROUNDS = 3


def main() -> None:
    torch.set_num_threads(1)
    own = {
        f"{kind}/{number}": torch.randn(1024, 1024)
        for kind in ("weights", "adam_m", "adam_v")
        for number in range(MATRICES)
    }
    size = sum(tensor.numel() * 4 for tensor in own.values())
    with tempfile.TemporaryDirectory() as folder:
        run = RunFiles(Path(folder))
        run.nodes.mkdir()
        run.secret.write_text(secrets.token_hex(32), encoding="ascii")
        run.secret.chmod(0o600)
        command = [sys.executable, "-m", "megatron_ext.checkpoints.keeper", folder]
        keepers = [subprocess.Popen([*command, node, "0"]) for node in ("a", "b")]
        try:
            while not all(run.keeper(node).exists() for node in ("a", "b")):
                time.sleep(0.05)
            for iteration in range(1, ROUNDS + 1):
                _save(run, own, size, At("0.0", iteration))
        finally:
            for keeper in keepers:
                keeper.kill()
                keeper.wait()
    print(f"load {os.getloadavg()[0]:.1f}")


def _save(run: RunFiles, own: dict[str, torch.Tensor], size: int, at: At) -> None:
    began = time.process_time()
    copy = {name: tensor.detach().to("cpu", copy=True) for name, tensor in own.items()}
    copied = time.process_time()
    content = safetensors.encoded(copy, of_part("layer", at.iteration))
    for node in ("a", "b"):
        with Keeper(run, node, at.start) as keeper:
            keeper.put(at, "layer", digest_of(bytes(content[0])), content, At(at.start, at.iteration - 1))
    sent = time.process_time()
    print(f"{size / 1e6:.0f} MB: copied in {copied - began:.3f} CPU s, sent in {sent - copied:.3f} CPU s")


if __name__ == "__main__":
    main()
