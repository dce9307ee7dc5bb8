"""Profiles of modules that nobody has written: random sequences of blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from conf.schema.experiment import Precision
from fasop.costs.measured_module import LOSS
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts, Module, ModuleBlock, SequenceBytes
from fasop.costs.profiles.profile_text import profile_text

SIZES = (1, 2)
"""Micro-batch sizes."""


def random_profile(
    rng: np.random.Generator, folder: Path, blocks: int, capture: bool = False, *, wires: bool = False
) -> LayerProfile:
    """Of `code(folder)`, which is written there, too, with this many blocks of up to three kinds; with `wires` they
    are any graph, else a chain."""
    file = folder / "net.py"
    file.write_text("nobody imports this\n")
    kinds = [f"Kind-{number}" for number in range(int(rng.integers(1, 4)))]
    parameters = {kind: int(rng.integers(0, 10**6)) for kind in kinds}
    of = [kinds[int(rng.integers(len(kinds)))] for _ in range(blocks)]
    leads = random_wires(rng, blocks) if wires else []
    module = Module(
        code="net.py:Net",
        digest=hashlib.sha256(file.read_bytes()).hexdigest(),
        capture=capture,
        blocks=[ModuleBlock(name=f"b{n}", kind=kind, parameters=parameters[kind]) for n, kind in enumerate(of)],
        wires=leads,
    )
    times = {kind: rng.uniform(0.1, 5.0, 2).tolist() for kind in (*kinds, LOSS)}
    kept, crossing = rng.integers(0, 10**6, blocks), rng.integers(1, 10**6, blocks)
    sizes = rng.integers(1, 10**6, len(leads))
    if wires:
        alive = [[giver < after <= max(takers) for giver, *takers in leads] for after in range(1, blocks + 1)]
        crossing = np.array(alive) @ sizes
    costs = [
        ModelCosts.of(
            {
                kind: Cost(forward=round(size * one, 6), backward=round(size * other, 6), activation_bytes=size * 100)
                for kind, (one, other) in times.items()
            },
            model="module",
            tensor=1,
            micro_batch_size=size,
            precision=Precision.fp32,
            sequence=SequenceBytes(
                kept=(size * kept).tolist(),
                given=(size * crossing).tolist(),
                crossing=[0, *(size * crossing).tolist()],
                wires=(size * sizes).tolist(),
            ),
        )
        for size in SIZES
    ]
    return LayerProfile(
        gpu="CPU",
        source="a test",
        modules={"module": module},
        costs=costs,
        optimizer_ns_per_parameter={Precision.fp32: 1.0},
    )


def random_wires(rng: np.random.Generator, blocks: int) -> list[list[int]]:
    """Each block gives one to three wires, to any blocks behind it; the loss takes one of the last block's."""
    found: list[list[int]] = []
    for giver in range(blocks):
        for number in range(int(rng.integers(1, 4))):
            behind = range(giver + 1, blocks)
            takers = (
                {int(one) for one in rng.choice(behind, int(rng.integers(1, len(behind) + 1)))} if behind else set()
            )
            if number == 0:
                takers.add(giver + 1)
            if takers:
                found.append([giver, *sorted(takers)])
    return found


def written(profile: LayerProfile, folder: Path) -> Path:
    path = folder / "profile.yaml"
    path.write_text(profile_text(profile, "a test"))
    return path


def words(folder: Path, *more: str) -> list[str]:
    """Of a search that cannot look at the module, which no Python file is."""
    return ["model=module", f"model.code={folder / 'net.py'}:Net", "container=enroot", "executor=slurm", *more]
