"""Damaged logs of Megatron-LM, old and new, alone and in a job's folder, and what reads them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.mutate import damaged, replaced_oddly
from tests.reports.readers.test_megatron_log import ARGUMENTS, RANKS
from tests.reports.readers.test_upstream_log import LOG
from tests.support.reports.legacy import Job, calls, job_info, log

GPUSTAT = "n060 Thu Jun 15 10:20:30 2023 525.85\n[0] NVIDIA A10 | 61'C, 97 % | 11468 / 22731 MB | ada(11449M)\n"
LINES = (
    *(
        "  num_layers ................... 999999999",
        " iteration 999999999999/ 1 | elapsed time per iteration (ms): 1e308 |",
    ),
    *(
        "  pipeline_model_parallel_size ... 0",
        "  world_size .......... 16384",
        "TENSOR_MP_SIZE: 4",
        "PARTITION: 0-9999-0",
    ),
    *(
        "times across ranks (ms):",
        "  forward-compute:",
        "     rank 99999: 1.00",
        "     rank  0: 1e308",
        "     rank -1: 1",
    ),
    *(
        " iteration 1/ 1 | elapsed time per iteration (ms): nan | lm loss: inf |",
        "iteration 2/ 3 | lm loss: |",
        "0: 1: 2:",
    ),
)
WORDS = ("--tensor 2", "--pipeline 2", "--data 1", "--pipeline 999999999", "--csv", "--trace", "--tensor 0", "--data 3")


def draw(random: Random, folder: Path) -> list[str]:
    text = random.choice(texts()).encode()
    paths = [folder / "train.log"]
    if random.random() < 0.3:
        (folder / "1234").mkdir()
        paths = [folder / f"1234/n{number:03}.{kind}" for number in range(2) for kind in ("out", "gpu")]
    for path in paths:
        path.write_bytes(GPUSTAT.encode() * 3 if path.suffix == ".gpu" else text)
    for _ in range(random.choice((1, 1, 2, 5))):
        path = random.choice(paths)
        if random.random() < 0.05:
            replaced_oddly(random, path)
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
            path.write_bytes(random.choice((damaged, mixed))(random, path.read_bytes()))
    options = " ".join(random.sample(WORDS, random.choice((0, 0, 1, 2)))).split()
    return ["report", str(random.choice((paths[0], paths[0].parent)).relative_to(folder)), *options]


def mixed(random: Random, content: bytes) -> bytes:
    """With lines of others, or those of another job, somewhere in it."""
    lines = content.splitlines(keepends=True)
    for _ in range(random.choice((1, 3, 10))):
        line = random.choice((*LINES, *random.choice(texts()).splitlines()))
        lines.insert(random.randrange(len(lines) + 1), line.encode() + random.choice((b"\n", b"\n", b"\r\n", b"")))
    return b"".join(lines)


@cache
def texts() -> tuple[str, ...]:
    jobs = (Job(), Job(pipeline=4, data=2, micro_batches=4), Job(skipped=frozenset({2}), interval=1, before=3))
    return (
        *(job_info(job, 0) + log(job, calls(job)) for job in jobs),
        LOG,
        ARGUMENTS + LOG,
        ARGUMENTS + RANKS + LOG,
        RANKS,
    )
