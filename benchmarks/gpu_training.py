"""python -m benchmarks.gpu_training FOLDER --call 1: what one GPU trains a second, ours beside others in the same call.

FOLDER is what `python -m benchmarks.gpu.prepare` wrote on a machine with tdpp; here torch and numpy suffice. A day with
a GPU goes through `--call 1`, 2 and 3, of ten minutes each; CASE:CONTENDER… are measured before what the call has.
Every measurement is a file of its own as soon as it is done. One that fails does not end the others, and what there was
no time for is printed. MFU counts model operations (`contract.models.counts`) against the GPU's dense bf16 peak.
`--device cpu` only shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.profiled import Counts, Result
from benchmarks.gpu.run import ours, profile, python
from megatron_ext.contract.models.counts import flops_per_sample
from megatron_ext.contract.plan import Plan

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
OURS: dict[str, Callable[[Path, str, float], Result]] = {
    "ours": partial(ours, changes={}),
    "ours-compiled": partial(ours, changes={"train": {"compile": True}}),
    "ours-without-timeline": partial(ours, changes={"timeline": False}),
    **{f"ours-part-{bits}": partial(ours, changes={}, altered=[f"loss-part={2**bits}"]) for bits in (22, 25, 26)},
    "ours-same-images": partial(ours, changes={}, altered=["same-images"]),
}
PROFILE = "profile"
OTHERS = ("plain", "plain-compiled", "megatron-core")
CONTENDERS = (*OURS, *OTHERS, PROFILE)
LARGE = ("ours", "plain", "megatron-core", "ours-compiled", "plain-compiled", "ours")
CALLS = {
    1: [
        *("tiny:ours", "tiny:ours"),
        *(f"gpt2-124m:{one}" for one in ("ours", "plain", "ours-compiled", "plain-compiled", "ours-without-timeline")),
        "gpt2-124m:ours",
        *(f"gpt2-xl:{one}" for one in LARGE),
        *(f"llama-1b:{one}" for one in LARGE),
        *(f"gpt2-124m:{one}" for one in ("ours", "ours-part-22", "ours-part-25", "ours-part-26")),
    ],
    2: [
        *("gpt2-124m:ours", "gpt2-124m-dropout:ours", "gpt2-124m-dropout:plain"),
        *("gpt2-124m-2-streams:ours", "gpt2-124m-4-streams:ours", "gpt2-124m-fp16:ours", "gpt2-124m-recompute:ours"),
        *("vit-b16:ours", "vit-b16-2-streams:ours", "vit-b16-4-streams:ours", "vit-b16:ours-same-images"),
        *("resnet50:ours", "resnet50:ours-same-images", "vit-b16:ours", "gpt2-124m:ours"),
    ],
    3: [
        *(f"profile-{model}:profile" for model in ("gpt2-124m", "gpt2-xl", "llama-1b")),
        *("gpt2-124m:ours", "gpt2-124m-micro-4:ours", "gpt2-xl:ours", "gpt2-xl-micro-2:ours"),
        *("llama-1b:ours", "llama-1b-micro-2:ours", "gpt2-124m:ours"),
    ],
}
"""What a day with a GPU measures, in this order; what others are compared with is repeated."""
Record = dict[str, Any]
Clock = Callable[[], float]
MINUTES = 9.5
"""Minutes of a call, whose ten include the start."""
MOST = 1 / 4
"""The part of a call's minutes that one measurement may take: a compiler that hangs must not take those of all."""
MACHINE = """
import json, os, platform, sys, torch
found = {"torch": torch.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
if sys.argv[1] == "cuda":
    gpu = torch.cuda.get_device_properties(0)
    found.update(device=gpu.name, memory_mib=gpu.total_memory / 2**20, cuda=torch.version.cuda)
print(json.dumps({"device": "CPU", **found}))
"""
"""In a process of its own: a context of this one would take the GPU's memory."""


def used_mib() -> int | None:
    """What nvidia-smi says of the first GPU; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


@contextmanager
def gpu_memory() -> Iterator[list[int]]:
    """The MiB that the GPU has used in this block more than before it, as they change."""
    before, over = used_mib(), threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not over.wait(0.5) and before is not None:
            if (now := used_mib()) is not None:
                seen.append(now - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def trained(case: Path, contender: str, device: str, seconds: float) -> Result:
    """In processes of their own, which leave nothing in the GPU's memory."""
    if contender in OURS:
        return OURS[contender](case, device, seconds)
    words = ["-m", "benchmarks.gpu.contenders", contender, str(case / "plan.json"), device]
    found = json.loads(python(words, seconds, [case.parent / "site"]).splitlines()[-1])
    return replace(Result(**found), counts=Counts(**found["counts"]))


def measured(case: Path, contender: str, device: str, seconds: float, peak_tflops: float | None) -> Record:
    """What the file of a measurement says beside what it is of."""
    if contender == PROFILE:
        return {"rank": profile(case, device, seconds)}
    with gpu_memory() as used:
        result = trained(case, contender, device, seconds)
    found = asdict(result)
    plan = Plan.read(case / "plan.json")
    if plan.model.tokens:
        found["tokens_per_s"] = result.samples_per_s * plan.model.tokens
    if used and "max_reserved" in result.mib:
        found["used_mib"] = max(used)
    if peak_tflops is not None and plan.train.precision != "fp32":
        found["mfu"] = result.samples_per_s * flops_per_sample(plan.model) / (peak_tflops * 1e12)
    expected = case / "losses.json"
    if contender in OURS and expected.exists():
        pairs = zip(result.losses, json.loads(expected.read_text()), strict=True)
        found["furthest_from_the_cpu"] = max(abs(one - other) for one, other in pairs)
    return found


def in_time(
    wanted: list[str], seconds: float, measure: Callable[[str, str, float], Record], clock: Clock = time.monotonic
) -> Iterator[Record]:
    """Measures one after another for so long; what there was no time for is left in `wanted`."""
    end, most = clock() + seconds, MOST * seconds
    while wanted and (left := end - clock()) > 0:
        case, _, contender = wanted[0].partition(":")
        found = {"case": case, "contender": contender}
        began = clock()
        try:
            found |= measure(case, contender, min(left, most))
        except TimeoutError as error:
            if left < most:
                return
            found["failed"] = str(error)
        except Exception as error:  # noqa: BLE001  (whatever one meets, the others' minutes are not lost)
            found["failed"] = f"{type(error).__name__}: {error}"
        wanted.pop(0)
        yield {**found, "took_s": round(clock() - began, 1)}


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Names the next file of a folder."""
    number = len([*folder.glob("*.json")]) + 1
    name = f"{number:02d}-{content['case']}-{content['contender']}.json"
    (folder / name).write_text(json.dumps(content) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("given", nargs="*", metavar="CASE:CONTENDER", help=f"contenders: {', '.join(CONTENDERS)}")
    parser.add_argument("--call", type=int, choices=CALLS, help="what that call of a day with a GPU measures")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of them ({MINUTES})")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the GPU (default: by its name)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path, required=True, metavar="FOLDER", help="gets a file for each")
    arguments = parser.parse_args()
    folder, device = arguments.folder.resolve(), arguments.device
    wanted = [*arguments.given, *CALLS.get(arguments.call, ())]
    if not wanted:
        parser.error("give CASE:CONTENDER or --call")
    for one in wanted:
        case, _, contender = one.partition(":")
        if contender not in CONTENDERS:
            parser.error(f"{one}: the contender must be one of {', '.join(CONTENDERS)}")
        if not (folder / case / "plan.json").exists():
            parser.error(f"{one}: no {arguments.folder / case}/plan.json; python -m benchmarks.gpu.prepare writes it")
    arguments.results.mkdir(parents=True, exist_ok=True)
    machine = json.loads(python(["-c", MACHINE, device]))
    peak = arguments.peak_tflops or PEAK_TFLOPS.get(machine["device"])
    print(json.dumps(machine), flush=True)
    if peak is None:
        print(f"{machine['device']}: its peak is not known here, so there is no MFU; give --peak-tflops", flush=True)
    call = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())

    def measure(case: str, contender: str, seconds: float) -> Record:
        return measured(folder / case, contender, device, seconds, peak)

    for found in in_time(wanted, 60 * arguments.minutes, measure):
        write(arguments.results, {**found, "call": call, "machine": machine})
        print(_line(found), flush=True)
    if wanted:
        print(f"no time for: {' '.join(wanted)}", flush=True)


def _line(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"{found['case']}:{found['contender']} failed after {found['took_s']} s: {found['failed'][-400:]}"
    rate = f", {found['samples_per_s']:.1f} samples/s" if "samples_per_s" in found else ""
    mfu = f", MFU {found['mfu']:.1%}" if "mfu" in found else ""
    return f"{found['case']}:{found['contender']}{rate}{mfu}, took {found['took_s']} s"


if __name__ == "__main__":
    main()
