"""Makes a run folder as a run would leave it, by simulating its schedule; every file is as docs/formats.md says."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.contract.events import NAMES
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.iteration import schedule
from megatron_ext.contract.schedule.schedules import Kind

RECORD = np.dtype("<u2,<u2,<u4,<i4,<i4,<i8,<i8")
ID = {name: index for index, name in enumerate(NAMES)}
UNIX_NS = 1_760_000_000_000_000_000
LATENCY_NS = 120_000


@dataclass(frozen=True)
class Shape:
    """What to simulate. A node has `ranks_per_node` ranks and its own clock."""

    pipeline: int = 2
    chunks: int = 1
    schedule: str = "one_f_one_b"
    data: int = 1
    micro_batches: int = 4
    iterations: int = 3
    ranks_per_node: int = 4
    layers: int = 8
    seed: int = 1
    clock_skew_ns: int = 40_000_000_000
    """How far the clock of a node is from that of the node before."""
    clock_drift: float = 2e-6
    """Nanoseconds that the clock of a node gains per nanosecond on that of the node before."""
    gpus: tuple[str, ...] = ("A100", "A10")
    """Of the first node, and of the others."""
    overrides: tuple[str, ...] = ("experiment=tiny", "train.iterations=3")
    rehearsal: str | None = None
    """Its clock; all ranks are then on one machine."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """By rank, how many times as long its passes take."""
    link_ns: Mapping[int, int] = field(default_factory=dict)
    """By stage, what a message to or from the next one takes; elsewhere LATENCY_NS."""
    parts: tuple[int, ...] | None = None
    """Layers of each virtual stage, where they are not shared evenly."""
    data_ns: float = 0.3e6
    """Of a micro-batch, on the first stage."""
    embedding_ns: float = 4e6
    """Of the all-reduce."""

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    def partition(self) -> list[int]:
        if self.parts is not None:
            return list(self.parts)
        virtual_stages = self.pipeline * self.chunks
        share, rest = divmod(self.layers, virtual_stages)
        return [share + (number < rest) for number in range(virtual_stages)]

    def peak_mib(self, rank: int) -> float:
        """What a rank tells of its memory."""
        return 10_000.25 + 1000 * (rank % self.data) - 100 * (rank // self.data)


def ranks_of(shape: Shape) -> list[Place]:
    """As the plan has them."""
    return [Place(rank, 0, rank, rank // shape.data, rank % shape.data, 0) for rank in range(shape.ranks)]


@dataclass
class Replay:
    """Times of one run on rank 0's clock, ns; `records[rank]` are tuples of RECORD."""

    shape: Shape
    free: list[int] = field(default_factory=list)
    records: list[list[tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.shape.seed)
        self.free = [5_000_000_000] * self.shape.ranks
        self.records = [[] for _ in range(self.shape.ranks)]

    def note(
        self,
        rank: int,
        name: str,
        iteration: int,
        start: int,
        end: int,
        micro_batch: int = -1,
        peer: int = -1,
        chunk: int = 0,
    ) -> None:
        self.records[rank].append((ID[name], chunk, iteration, micro_batch, peer, start, end))

    def work(self, rank: int, name: str, iteration: int, mean_ns: float, micro_batch: int = -1, chunk: int = 0) -> int:
        """The rank does something as soon as it is free; returns the end."""
        start = self.free[rank]
        end = start + int(mean_ns * self.random.lognormvariate(0, 0.05)) + 1
        self.note(rank, name, iteration, start, end, micro_batch, chunk=chunk)
        self.free[rank] = end + self.random.randrange(2_000, 20_000)
        return end

    def receive(
        self, rank: int, name: str, iteration: int, sent: int, micro_batch: int, peer: int, chunks: tuple[int, int]
    ) -> None:
        """Waits for what `peer` sends at `sent`, and notes both ends of the transfer: own chunk, then the peer's."""
        start = self.free[rank]
        stages = sorted((rank // self.shape.data, peer // self.shape.data))
        takes = self.shape.link_ns.get(stages[0], LATENCY_NS) if stages[1] - stages[0] == 1 else LATENCY_NS
        arrived = max(start, sent + takes) + self.random.randrange(50_000)
        self.note(rank, name, iteration, start, arrived, micro_batch, peer, chunks[0])
        handed_over = sent + self.random.randrange(20_000, 90_000)
        self.note(peer, name.replace("recv", "send"), iteration, sent, handed_over, micro_batch, rank, chunks[1])
        self.free[rank] = arrived

    def iteration(self, number: int) -> None:
        shape = self.shape
        slow = 3.0 if number == 1 else 1.0
        for dp in range(shape.data):
            self.replica(number, dp, slow)
        for stage in range(shape.pipeline):
            ranks = [stage * shape.data + dp for dp in range(shape.data)]
            self.together("grads-all-reduce", number, ranks, 9e6)
        if shape.pipeline > 1:
            for dp in range(shape.data):
                ends = [dp, (shape.pipeline - 1) * shape.data + dp]
                self.together("embedding-grads-all-reduce", number, ends, shape.embedding_ns)
        starts = list(self.free)
        for dp in range(shape.data):
            self.together("grad-norm-all-reduce", number, list(range(dp, shape.ranks, shape.data)), 0.2e6)
        for rank in range(shape.ranks):
            self.free[rank] += 1_000_000
            self.note(rank, "optimizer-clip-main-grad", number, starts[rank], self.free[rank])
            end = self.free[rank] + int(6e6 * self.random.lognormvariate(0, 0.05))
            self.note(rank, "optimizer", number, starts[rank], end)
            self.free[rank] = end

    def together(self, name: str, iteration: int, ranks: list[int], mean_ns: float) -> None:
        end = max(self.free[rank] for rank in ranks) + int(mean_ns * self.random.lognormvariate(0, 0.1))
        for rank in ranks:
            self.note(rank, name, iteration, self.free[rank], end)
            self.free[rank] = end

    def replica(self, iteration: int, dp: int, slow: float) -> None:
        """One iteration of a replica: each stage goes through its actions as soon as their inputs are there."""
        shape, p = self.shape, self.shape.pipeline
        partition = shape.partition()
        todo = schedule(shape.schedule, p, shape.chunks, shape.micro_batches)
        done: dict[tuple[str, int, int], int] = {}
        while any(todo):
            for stage in range(p):
                rank = stage * shape.data + dp
                while todo[stage]:
                    kind, i, chunk = todo[stage][0]
                    here, way = chunk * p + stage, kind.value.split("-")[0]
                    source = here - 1 if way == "forward" else here + 1
                    receives = kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
                    if receives and (way, source, i) not in done:
                        break
                    todo[stage].pop(0)
                    if receives:
                        peer, sent = source % p * shape.data + dp, done[way, source, i]
                        self.receive(rank, kind.value, iteration, sent, i, peer, (chunk, source // p))
                    elif kind.value.endswith("-compute"):
                        if kind is Kind.FORWARD:
                            self.work(rank, "batch-generator", iteration, 0.3e6 if stage else shape.data_ns, i)
                        cost = (partition[here] + 0.3) * 2.5e6 * slow * (2 if kind is Kind.BACKWARD else 1)
                        cost *= shape.slow.get(rank, 1.0)
                        end = self.work(rank, kind.value, iteration, cost, i, chunk)
                        if kind is not Kind.BACKWARD_WEIGHT:
                            done[way, here, i] = end
                        if kind is Kind.FORWARD and here == len(partition) - 1:
                            self.work(rank, "loss-compute", iteration, 0.8e6, i, chunk)


def plan(shape: Shape, name: str) -> dict[str, Any]:
    nodes = [node_name(node) for node in range(shape.nodes)]
    return {
        "version": 1,
        "run": name,
        "tensor": 1,
        "data": shape.data,
        "pipeline": shape.pipeline,
        "chunks": shape.chunks,
        "partition": shape.partition(),
        "recompute": "none",
        "sharded_optimizer": False,
        "sequence_parallel": False,
        "schedule_file": None,
        "schedule": shape.schedule,
        "micro_batch_size": 1,
        "global_batch_size": shape.data * shape.micro_batches,
        "master_port": None,
        "nodes": [
            {
                "name": node,
                "group": node.split("-")[0],
                "gpu": shape.gpus[min(index, len(shape.gpus) - 1)],
                "ranks": [rank for rank in range(shape.ranks) if rank // shape.ranks_per_node == index],
            }
            for index, node in enumerate(nodes)
        ],
        "ranks": [
            {
                "rank": rank,
                "node": rank // shape.ranks_per_node,
                "local_rank": rank % shape.ranks_per_node,
                "stage": rank // shape.data,
                "dp": rank % shape.data,
                "tp": 0,
                "emulates": None,
            }
            for rank in range(shape.ranks)
        ],
        "model": {
            "layers": shape.layers,
            "hidden": 1600,
            "heads": 16,
            "sequence_length": 1024,
            "vocab_size": 50257,
            "padded_vocab_size": 50304,
        },
        "train": {"iterations": shape.iterations, "seed": 1234, "precision": "fp32", "log_interval": 1},
        "data_prefix": "/data/text_document",
        "data_split": [969, 30, 1],
        "data_cache": None,
        "timeline": True,
        "device": "cuda",
        "rehearsal": None,
    }


GPU = {"memory_gib": 22.2, "fp32_tflops": 31.2, "fp16_tflops": 125, "bf16_tflops": 125, "memory_gb_per_s": 600}
GROUP = {"intra_gbit_per_s": 128, "intra_latency_us": 10, "inter_gbit_per_s": 40, "inter_latency_us": 20}
PRICE_PER_HOUR = 8.0
"""Of a node."""


def config(shape: Shape, name: str) -> dict[str, Any]:
    """The configuration of the plan, whose GPUs have the profile of the A10; JSON is YAML as well."""
    groups: dict[str, dict[str, Any]] = {}
    for node in range(shape.nodes):
        group = groups.setdefault(node_name(node).split("-")[0], GROUP | {"count": 0})
        gpu = shape.gpus[min(node, len(shape.gpus) - 1)]
        ranks = min(shape.ranks, shape.ranks_per_node)
        group |= {"gpu": gpu, "gpus_per_node": ranks, "price_per_hour": PRICE_PER_HOUR, "count": group["count"] + 1}
    content = plan(shape, name)
    keys = ("tensor", "data", "pipeline", "chunks", "schedule", "micro_batch_size", "global_batch_size")
    sizes = ("layers", "hidden", "heads", "sequence_length", "vocab_size")
    return {
        "name": name,
        "cluster": {
            "name": "synthetic",
            "gpus": {gpu: GPU | {"name": gpu, "profile": "a10"} for gpu in shape.gpus},
            "groups": groups,
        },
        "model": {"name": "xl"} | {key: content["model"][key] for key in sizes},
        "parallel": {key: content[key] for key in keys} | {"partition": "-".join(map(str, shape.partition()))},
        "container": {},
        "executor": {},
        "train": {"iterations": shape.iterations, "log_interval": 1},
        "data": {"prefix": content["data_prefix"]},
        "engine": {},
        "profile": {},
    }


def rehearsed(plan: dict[str, Any], clock: str) -> dict[str, Any]:
    """The plan on one machine; the times by rank, which no report reads, are left out."""
    ranks = [
        rank | {"node": 0, "local_rank": rank["rank"], "emulates": plan["nodes"][rank["node"]]["name"]}
        for rank in plan["ranks"]
    ]
    every = [rank["rank"] for rank in ranks]
    node = {"name": "rehearsal-0", "group": "rehearsal", "gpu": "CPU", "ranks": every}
    rehearsal = {"clock": clock, "nodes": plan["nodes"]}
    return plan | {"nodes": [node], "ranks": ranks, "device": "cpu", "rehearsal": rehearsal}


def node_name(node: int) -> str:
    return f"g{min(node, 1)}-{node}"


def event_file(rank: int, shape: Shape, records: list[tuple[int, ...]]) -> bytes:
    """The event file of a rank, on the clock of its node, with clock records at both ends."""
    node = rank // shape.ranks_per_node
    machine = 0 if shape.rehearsal else node
    skew, drift = machine * shape.clock_skew_ns, 1 + machine * shape.clock_drift

    def own(time: int) -> int:
        return round(time * drift) + skew

    moved = [(*record[:5], own(record[5]), own(record[6])) for record in records]
    ends = [records[0][5] - 1_000_000, max(record[6] for record in records) + 1_000_000] if records else [0]
    uncertainty = 0 if machine == 0 else 30_000 + 1_000 * machine
    clock = [(ID["clock"], 0, 0, -1, -1, own(time), time) for time in ends]
    clock = [(*record[:4], uncertainty, *record[5:]) for record in clock]
    header = {
        "version": 1,
        "rank": rank,
        "stage": rank // shape.data,
        "dp": rank % shape.data,
        "tp": 0,
        "node": node_name(node),
        "host": f"host{machine}",
        "pid": 1000 + rank,
        "names": NAMES,
        "monotonic_ns": own(0),
        "unix_ns": UNIX_NS,
    }
    text = json.dumps(header).encode()
    rows = [clock[0], *sorted(moved, key=lambda record: record[6]), *clock[1:]]
    return b"TDPPEVT1" + struct.pack("<I", len(text)) + text + np.array(rows, RECORD).tobytes()


def make_run(folder: Path, shape: Shape) -> list[list[tuple[int, ...]]]:
    """Writes the run folder and returns its events by rank, times on rank 0's clock."""
    for name in ("nodes", "events", "errors", "checkpoints"):
        (folder / name).mkdir(parents=True)
    name = f"{folder.parent.name}/{folder.name}"
    content = plan(shape, name)
    if shape.rehearsal:
        content = rehearsed(content, shape.rehearsal)
    replay = Replay(shape)
    metrics = []
    for number in range(1, shape.iterations + 1):
        begin = max(replay.free)
        replay.iteration(number)
        elapsed = (max(replay.free) - begin) / 1e6
        metrics.append(
            {
                "iteration": number,
                "unix": (UNIX_NS + max(replay.free)) / 1e9,
                "consumed_samples": number * content["global_batch_size"],
                "elapsed_ms": elapsed,
                "learning_rate": 1.5e-4,
                "loss": None if shape.rehearsal else 3 + 7.8 * 0.93**number + replay.random.gauss(0, 0.05),
                "grad_norm": 2.5,
                "tflops_per_rank": 40 + number,
                "tokens_per_s": content["global_batch_size"] * 1024 / elapsed * 1e3,
                "skipped": 0,
                "nan": 0,
            }
        )
    for rank, records in enumerate(replay.records):
        (folder / f"events/rank-{rank:05d}.bin").write_bytes(event_file(rank, shape, records))
    (folder / "plan.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "config.yaml").write_text(json.dumps(config(shape, folder.parent.name), indent=2))
    (folder / "overrides.txt").write_text("".join(line + "\n" for line in shape.overrides))
    (folder / "provenance.json").write_text(
        json.dumps(
            {
                "unix": UNIX_NS / 1e9,
                "commit": "0123456789abcdef0123456789abcdef01234567",
                "changed": [],
                "user": "ada",
                "host": "login1",
                "versions": {"python": "3.11.7", "torch": "2.7.1"},
            }
        )
    )
    for node in content["nodes"]:
        state = {"node": node["name"], "state": "ended", "exit_code": 0, "host": "host"}
        (folder / f"nodes/{node['name']}.json").write_text(json.dumps(state))
    if not shape.rehearsal:
        (folder / "memory").mkdir()
        for rank in content["ranks"]:
            mib = {
                "allocated": 9.5,
                "max_allocated": shape.peak_mib(rank["rank"]),
                "reserved": 2e4,
                "max_reserved": 2e4,
            }
            told = {"rank": rank["rank"], "stage": rank["stage"], "iteration": shape.iterations, "mib": mib}
            iterations = [*range(1, shape.iterations + 1)]
            course = [shape.peak_mib(rank["rank"]) - 500 / number for number in iterations]
            told["course"] = {"iterations": iterations, "mib": course}
            (folder / f"memory/rank-{rank['rank']:05d}.json").write_text(json.dumps(told))
    return replay.records
