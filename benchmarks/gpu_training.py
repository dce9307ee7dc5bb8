"""python -m benchmarks.gpu_training FOLDER CASE:CONTENDER…: tokens/s on one GPU, ours beside others in the same call.

FOLDER is what `python -m benchmarks.gpu.prepare` wrote on a machine with tdpp; here torch and numpy suffice, and
megatron-core for its contender. A day with a GPU goes through `--call 1` and 2, of ten minutes each; a contender that
fails is told and does not end the others. MFU counts model operations (`contract.schedule.operations`) against the
GPU's dense bf16 peak. `--device cpu` only shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contenders import megatron_core, plain
from benchmarks.gpu.profiled import Result
from benchmarks.gpu.run import ours
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.operations import flops_per_token

PEAK_TFLOPS = {
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA GeForce RTX 3090": 71.0,
}
"""bf16 on tensor cores without sparsity, by the name that CUDA tells; NVIDIA's data sheets, which print twice as much
for the H100 and H200, "with sparsity"."""
COMPILED = {"train": {"compile": True}}
OURS: dict[str, Callable[[Path, str], Result]] = {
    "ours": partial(ours, changes={}),
    "ours-compiled": partial(ours, changes=COMPILED),
    "ours-without-timeline": partial(ours, changes={"timeline": False}),
    **{f"ours-part-{bits}": partial(ours, changes={}, part=2**bits) for bits in (22, 25, 26)},
}
OTHERS: dict[str, Callable[[Path, str], Result]] = {
    "plain": partial(plain, compiled=False),
    "plain-compiled": partial(plain, compiled=True),
    "megatron-core": megatron_core,
}
CONTENDERS = (*OURS, *OTHERS)
CALLS = {
    1: [
        *("tiny:ours", "tiny:ours"),
        *(f"gpt2-124m:{one}" for one in ("ours", "plain", "ours-compiled", "plain-compiled", "ours-without-timeline")),
        *(f"gpt2-124m:{one}" for one in ("ours-part-22", "ours-part-25", "ours-part-26", "ours")),
        *(f"gpt2-xl:{one}" for one in ("ours", "plain", "megatron-core", "ours-compiled", "ours")),
        *(f"llama-1b:{one}" for one in ("ours", "plain", "megatron-core", "ours-compiled", "ours")),
    ],
    2: [
        *("gpt2-124m:ours", "gpt2-124m-dropout:ours", "gpt2-124m-fp16:ours"),
        *("gpt2-124m-2-streams:ours", "gpt2-124m-4-streams:ours", "gpt2-124m:ours"),
    ],
}
"""What a day with a GPU measures, in this order; the first of a model is repeated at its end."""


@contextmanager
def gpu_memory() -> Iterator[list[int]]:
    """The MiB that nvidia-smi says are used, as they change in the block; none where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    over, seen = threading.Event(), []

    def look() -> None:
        while not over.wait(0.5):
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                seen.append(int(done.stdout))
            except (OSError, subprocess.CalledProcessError, ValueError):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def measured(case: Path, contender: str, device: str, peak_tflops: float | None) -> dict[str, Any]:
    """One contender, in processes and so with the GPU's memory of its own."""
    began = time.monotonic()
    with gpu_memory() as used:
        if contender in OURS:
            result = OURS[contender](case, device)
        else:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                result = process.submit(OTHERS[contender], case / "plan.json", device).result()
    found = asdict(result) | {"took_s": round(time.monotonic() - began, 1)}
    found["loss"] = found.pop("losses")[-1]
    if used and "max_reserved" in result.mib:
        found["outside_the_allocator_mib"] = max(used) - result.mib["max_reserved"]
    if peak_tflops is not None:
        model = Plan.read(case / "plan.json").model
        found["mfu"] = result.tokens_per_s * flops_per_token(model) / (peak_tflops * 1e12)
    expected = case / "losses.json"
    if contender in OURS and expected.exists():
        pairs = zip(result.losses, json.loads(expected.read_text()), strict=True)
        found["furthest_from_the_cpu"] = max(abs(one - other) for one, other in pairs)
        found["losses"] = result.losses
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("given", nargs="*", metavar="CASE:CONTENDER", help=f"contenders: {', '.join(CONTENDERS)}")
    parser.add_argument("--call", type=int, choices=CALLS, help="what that call of a day with a GPU measures")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the GPU (default: by its name)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path, help="a file that gets a line for each")
    arguments = parser.parse_args()
    wanted = arguments.given or CALLS.get(arguments.call, [])
    if not wanted:
        parser.error("give CASE:CONTENDER or --call")
    for one in wanted:
        case, _, contender = one.partition(":")
        if contender not in CONTENDERS:
            parser.error(f"{one}: the contender must be one of {', '.join(CONTENDERS)}")
        if not (arguments.folder / case / "plan.json").exists():
            parser.error(f"{one}: no {arguments.folder / case}/plan.json; python -m benchmarks.gpu.prepare writes it")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    peak = arguments.peak_tflops or PEAK_TFLOPS.get(name)
    if peak is None:
        print(f"{name}: its peak is not known here, so there is no MFU; --peak-tflops tells it", flush=True)
    for one in wanted:
        case, _, contender = one.partition(":")
        found: dict[str, Any] = {"case": case, "contender": contender, "device": name, "torch": torch.__version__}
        try:
            found |= measured(arguments.folder.resolve() / case, contender, arguments.device, peak)
        except Exception as error:  # noqa: BLE001  (whatever one meets, the others' minutes are not lost)
            found["failed"] = f"{type(error).__name__}: {error}"
        line = json.dumps(found)
        print(line, flush=True)
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
