"""Damaged profiles, and files of the public layout that are imported as one."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

import numpy as np

from fasop.costs.profiles.files import FOLDER
from tests.fuzz.mutate import damaged, hurt

VALUES = (
    *(
        "0",
        "-1",
        "1e300",
        "1e-300",
        ".nan",
        ".inf",
        "null",
        "true",
        "''",
        "text",
        "[]",
        "{}",
        "[[1]]",
        "{a: 1}",
        "1e400",
    ),
    *("9" * 30, "9" * 5000, "${gpu}", "${oc.env:HOME}", "*x", "&x [*x]", "!!python/name:os.system", "0x7f", "???", "5"),
)


def draw(random: Random, folder: Path) -> list[str]:
    return random.choice((_yaml, _yaml, _yaml, _npy))(random, folder)


def _yaml(random: Random, folder: Path) -> list[str]:
    path = folder / "mine.yaml"
    text = (FOLDER / f"{random.choice(('cpu', 'a10'))}.yaml").read_text(encoding="utf-8")
    for _ in range(random.choice((0, 1, 1, 2))):
        text = _changed(random, text)
    path.write_text(text, encoding="utf-8")
    if random.random() < 0.5:
        hurt(random, path)
    small = ["experiment=demo", "cluster.groups.local.gpus_per_node=4", "cluster.gpus.cpu.profile=mine.yaml"]
    return [
        *random.choice(
            (
                ["search", *small, "parallel.schedule=one_f_one_b", "top=3"],
                ["search", *small, "parallel.schedule=gpipe", "page=page.html", "explain=1"],
                ["launch", *small[::2], "executor.rehearse=virtual", "dry_run=true"],
                _import("profile=mine.yaml", "add=true", files="known/x"),
            )
        )
    ]


def _changed(random: Random, text: str) -> str:
    """Another value for one of its keys, or the key twice, or not at all."""
    lines = text.splitlines()
    number = random.choice([number for number, line in enumerate(lines) if ":" in line and not line.startswith("#")])
    key, _, value = lines[number].rpartition(": ")
    new = f"{key}: {random.choice(VALUES)}{'}' if value.endswith('}') else ''}"
    lines[number : number + 1] = random.choice(([new], [new], [new], [], [lines[number], new]))
    return "\n".join(lines) + "\n"


def _import(*words: str, files: str) -> list[str]:
    of = ("gpu=CPU", "precision=fp32", "micro_batch_size=1", "backward_ratio=1.6", "model=tiny")
    return ["profile", f"import={files}", *of, *words]


def _npy(random: Random, folder: Path) -> list[str]:
    (folder / "known").mkdir()
    numbers = np.array(random.choices((1e-3, 2e-3, 0.0, -1.0, 1e300, np.nan, np.inf, 1e-320), (9, 9, *[0.3] * 6), k=6))
    if random.random() < 0.3:
        numbers = (
            np.abs(np.nan_to_num(numbers, posinf=1.0))
            .clip(0, 1e6)
            .astype(random.choice(("f4", "i8", "c16", "U8", "O", "?", "M8[s]", "f2")))
        )
    if random.random() < 0.2:
        numbers = numbers.reshape(random.choice(((6,), (2, 3), (1, 6), (6, 1))))
    content = io.BytesIO()
    np.save(content, numbers, allow_pickle=True)
    path = folder / f"known/x_{random.choice((0, 1, 2, 3, 10**20, '007', '9' * 200))}.npy"
    path.write_bytes(damaged(random, content.getvalue()) if random.random() < 0.5 else content.getvalue())
    if random.random() < 0.1:
        hurt(random, path)
    return _import("profile=made.yaml", files="known/x")
