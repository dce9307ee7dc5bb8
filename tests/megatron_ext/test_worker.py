"""The worker's promises: exit codes, the first cause told first, and nothing left running."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import Store, TCPStore

from megatron_ext import rank_processes, worker
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.worker import AGENT, SAVED, die_with_parent
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.parallel import interruption
from megatron_ext.parallel.store import AuthenticatedStore, StoreError
from megatron_ext.tasks.task import Micro
from tests.support import PATIENCE_S, ROOT, cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run

FOUR_RANKS = ("parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=1")
LONG = ("train.iterations=100000", "train.log_interval=1")


def pids(run: EngineRun) -> dict[int, int]:
    """Process ids by rank, as published; empty before that."""
    path = run.run.node_ranks("local-0")
    return {entry["rank"]: entry["pid"] for entry in json.loads(path.read_text())} if path.exists() else {}


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


TRAINS = """
import os, sys
from megatron_ext import worker
from megatron_ext.train import train

def told(*arguments, **options):
    train(*arguments, **options)
    os.write(1, f"{'torch._dynamo' in sys.modules}\\n".encode())

worker.train = told
print(worker.main([sys.argv[1], "0"]), "torch._dynamo" in sys.modules, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "compiler"),
    [
        ((), False),
        (("train.optimizer=sgd",), False),
        (("parallel.recompute=selective",), True),
        (("model.family=mamba", "model.position_embedding_type=none", "model.heads=1"), True),
    ],
    ids=["as it is", "sgd", "recomputed", "mamba"],
)
def test_ranks_do_without_torchs_compiler_or_share_one_import_of_it(
    engine_run: Callable[..., EngineRun], words: tuple[str, ...], compiler: bool
) -> None:
    """Its import takes 1.5 CPU seconds of the start of every run."""
    run = engine_run("engine=tdpp", "parallel=single", "parallel.data=2", "parallel.micro_batch_size=1", *words)
    done = subprocess.run(
        [sys.executable, "-c", TRAINS, str(run.run.plan)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert lines == [str(compiler), str(compiler), f"0 {compiler}"], done.stdout + done.stderr


@pytest.fixture
def long_run(engine_run: Callable[..., EngineRun]) -> Iterator[tuple[EngineRun, int]]:
    """Four ranks that train until somebody ends them."""
    run = engine_run(*FOUR_RANKS, *LONG, "train.comm_timeout_s=200")
    worker = run.start()
    wait_for(lambda: len(pids(run)) == 4)
    yield run, worker
    for pid in pids(run).values():
        assert not alive(pid)


def test_a_worker_hands_the_request_to_save_on_to_its_ranks(long_run: tuple[EngineRun, int]) -> None:
    run, worker = long_run
    wait_for(lambda: run.run.metrics.exists() and run.metrics())
    os.kill(worker, interruption.SIGNAL)
    assert ended(worker) == SAVED
    assert "ended after iteration" in run.run.node_out("local-0").read_text()
    assert (run.run.checkpoints / "latest").exists()


def test_a_stranger_who_knows_host_port_and_plan_gets_nothing_from_a_run(engine_run: Callable[..., EngineRun]) -> None:
    """Neither as torch's client does, which ranks once answered, nor with a secret of his own."""
    run = engine_run(*FOUR_RANKS, *LONG, f"executor.master_port={free_port()}")
    worker = run.start()
    wait_for(lambda: run.run.metrics.exists() and run.metrics())
    address = run.run.read_json(run.run.address)
    with pytest.raises(RuntimeError):
        TCPStore(address["host"], address["port"], None, False, timedelta(seconds=1)).set("checkpoint", "{}")
    with pytest.raises(StoreError, match="refused this rank"):
        AuthenticatedStore(address["host"], address["port"], b"guessed" * 8, timedelta(seconds=1))
    assert run.run.secret.stat().st_mode & 0o777 == 0o600
    before = len(run.metrics())
    wait_for(lambda: len(run.metrics()) > before)
    os.kill(worker, signal.SIGTERM)
    assert ended(worker) == 143


def test_ranks_that_cannot_prove_themselves_say_so(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run(*FOUR_RANKS, f"executor.master_port={free_port()}")
    run.run.secret.chmod(0o644)
    assert run.go() == 1
    assert f"others can read the run's secret (mode 644); chmod 600 {run.run.secret}" in run.stderr()


@pytest.mark.parametrize(("rank", "when"), cases.covering(product(range(4), ("while-starting", "while-training")), set))
def test_a_killed_rank_is_named_first_and_takes_the_others_along(
    long_run: tuple[EngineRun, int], rank: int, when: str
) -> None:
    run, worker = long_run
    if when == "while-training":
        wait_for(run.run.metrics.exists)
    os.kill(pids(run)[rank], signal.SIGKILL)
    start = time.monotonic()
    assert ended(worker) == 1
    assert time.monotonic() - start < run.plan.train.comm_timeout_s
    causes = [error for error in run.errors() if not error["symptom"]]
    assert [(error["rank"], error["type"]) for error in causes] == [(rank, "Killed")]
    assert "SIGKILL" in causes[0]["message"]
    exits = {entry["rank"]: entry["exit_code"] for entry in json.loads(run.run.node_ranks("local-0").read_text())}
    assert exits[rank] == -signal.SIGKILL
    assert None not in exits.values()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_told_to_stop_it_ends_its_ranks_and_blames_none(long_run: tuple[EngineRun, int], signum: int) -> None:
    run, worker = long_run
    wait_for(run.run.metrics.exists)
    os.kill(worker, signum)
    assert ended(worker) == 143
    assert run.errors() == []


def test_while_its_agent_lives_sigterm_is_left_to_that(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm sends it to every process of a job that is preempted."""
    monkeypatch.setenv(AGENT, str(os.getpid()))
    run = engine_run(*FOUR_RANKS, *LONG)
    worker = run.start()
    wait_for(lambda: run.run.metrics.exists() and run.metrics())
    for pid in (worker, *pids(run).values()):
        os.kill(pid, signal.SIGTERM)
    before = len(run.metrics())
    wait_for(lambda: len(run.metrics()) > before + 2)
    os.kill(worker, signal.SIGINT)
    assert ended(worker) == 143
    assert run.errors() == []
    assert not any(alive(pid) for pid in pids(run).values())


def test_sigterm_ends_a_worker_whose_agent_is_gone(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["true"])  # not waited for: what is left of it does not count
    monkeypatch.setenv(AGENT, str(gone.pid))
    run = engine_run(*FOUR_RANKS, *LONG)
    worker = run.start()
    wait_for(lambda: run.run.metrics.exists() and run.metrics())
    os.kill(worker, signal.SIGTERM)
    assert ended(worker) == 143
    assert not any(alive(pid) for pid in pids(run).values())
    gone.wait()


def test_a_killed_worker_takes_its_ranks_along(long_run: tuple[EngineRun, int]) -> None:
    run, worker = long_run
    wait_for(run.run.metrics.exists)
    os.kill(worker, signal.SIGKILL)
    ended(worker)
    wait_for(lambda: not any(alive(pid) for pid in pids(run).values()))


def test_a_stopped_rank_is_given_up_after_the_timeout_and_named_by_who_waited(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops as it begins an iteration: the other one is then waiting for its message, not in an all-reduce."""
    batch = AnyEngine._batch

    def stops(self: AnyEngine, iteration: int) -> dict[int, Micro | None]:
        if iteration == 4 and self._place.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return batch(self, iteration)

    monkeypatch.setattr(AnyEngine, "_batch", stops)
    run = engine_run(
        "parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2", *LONG, "train.comm_timeout_s=2"
    )
    assert ended(run.start()) == 1
    (error,) = run.errors()
    assert (error["rank"], error["type"]) == (0, "PeerLost")
    assert "rank 1" in error["message"]
    assert not alive(pids(run)[1])
    doing = {rank: found and found["process"] for rank, found in doings(run).items()}
    assert doing == {0: None, 1: "T"}, "what it did before it was ended tells who held the other up"


def doings(run: EngineRun) -> dict[int, dict]:
    """What the worker says that its ranks are doing, or were when it ended them."""
    return {entry["rank"]: entry["doing"] for entry in json.loads(run.run.node_ranks("local-0").read_text())}


def test_while_a_rank_stands_still_its_node_says_what_all_of_them_do(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "LOOK_S", 0.1)
    run = engine_run("parallel.data=1", "parallel.pipeline=3", *LONG)
    pid = run.start()
    wait_for(lambda: run.run.metrics.exists() and run.metrics())
    assert doings(run) == dict.fromkeys(range(3))
    os.kill(pids(run)[1], signal.SIGSTOP)
    wait_for(lambda: all(doings(run).values()) and [doings(run)[rank]["does"] for rank in (0, 2)] == ["waits", "waits"])
    found = doings(run)
    assert [found[rank]["process"] == "T" for rank in range(3)] == [False, True, False]
    assert {found[0]["what"], found[2]["what"]} <= {
        *("gradients from rank 1", "activations to rank 1", "activations from rank 1", *TOLD_TO_END)
    }
    os.kill(pids(run)[1], signal.SIGCONT)
    wait_for(lambda: doings(run) == dict.fromkeys(range(3)))
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 143


TOLD_TO_END = (
    "agreeing on whether to stop",
    "all-reduce of the gradient norm",
    "all-reduce of the embedding's gradient",
)
"""What else ranks may be waiting for between two iterations."""


def test_ranks_on_one_node_need_no_port(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run("parallel.data=2", "parallel.pipeline=1", "train.iterations=2")
    assert run.go() == 0, run.stderr()
    assert not run.run.address.exists()


def test_a_port_that_was_asked_for_is_where_they_meet(engine_run: Callable[..., EngineRun]) -> None:
    port = free_port()
    run = engine_run("parallel.data=2", "parallel.pipeline=1", "train.iterations=2", f"executor.master_port={port}")
    assert run.go() == 0, run.stderr()
    assert run.run.read_json(run.run.address)["port"] == port


def test_a_taken_port_is_named(engine_run: Callable[..., EngineRun]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = engine_run(f"executor.master_port={port}")
        assert run.go() == 1
    assert f"error: executor.master_port={port}: cannot listen there" in run.stderr()
    assert not any(alive(pid) for pid in pids(run).values())


def test_a_node_with_another_torch_ends_the_run_before_its_first_iteration(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = ("cluster.groups.local.count=2", "cluster.groups.local.gpus_per_node=1")
    run = engine_run(*nodes, "parallel.data=2", "parallel.pipeline=1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # where the ranks of several nodes meet
    workers = [run.start()]
    main = worker.main
    monkeypatch.setattr(worker, "main", lambda argv: main([argv[0], "1"]))
    monkeypatch.setattr(torch, "__version__", "1.0")
    workers.append(run.start())
    assert [ended(pid) for pid in workers] == [1, 1]
    for error in run.errors():
        assert "the ranks run different software: torch " in error["message"]
        assert "torch 1.0" in error["message"]
        assert not error["symptom"]
    assert not run.run.metrics.exists()


def test_a_loss_that_is_not_finite_ends_the_run_with_the_iteration_and_rank(
    engine_run: Callable[..., EngineRun],
) -> None:
    run = engine_run(*FOUR_RANKS, "train.lr=1e6", "train.clip_grad=0", "train.iterations=30")
    assert run.go() == 1
    causes = [error for error in run.errors() if not error["symptom"]]
    assert {error["stage"] for error in causes} == {1}
    assert all("the loss is nan" in error["message"] for error in causes)
    assert "Traceback" not in run.stderr()


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    prefix = tmp_path / "foreign"
    write_indexed(prefix, [np.full(500, 300, np.uint16)] * 4, np.dtype(np.uint16))
    run = make_run(tmp_path / "run", prefix)
    assert run.go() == 1
    assert "300" in run.stderr()
    assert "61" in run.stderr()


def test_a_checkpoint_folder_that_cannot_be_written_is_named(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run("train.iterations=2")
    run.run.checkpoints.rmdir()
    run.run.checkpoints.write_text("in the way")
    assert run.go() == 1
    assert "checkpoint" in run.stderr()
    assert "cannot be written" in run.stderr()
    assert run.run.checkpoints.read_text() == "in the way"


def test_memory_that_is_not_there_is_told_with_rank_and_stage(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run("parallel.data=1", "parallel.pipeline=2", "model.vocab_size=100000000", "model.hidden=4096")
    assert run.go() == 1
    causes = [error for error in run.errors() if not error["symptom"]]
    assert {error["stage"] for error in causes} <= {0, 1}
    assert causes
    assert all(error["message"].startswith("out of memory: ") for error in causes)
    assert "parallel.recompute=full" in run.stderr()
    assert "Traceback" not in run.stderr()


def test_a_rank_on_a_cpu_computes_in_the_memory_that_it_freed(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would clear some 250 pages again for every MiB that a pass frees."""

    def passes(*_: object, **__: object) -> None:
        cleared = []
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            kept = [torch.ones(rows, 1024) for rows in range(1000, 2000, 100)]
            kept.clear()
            cleared.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        assert cleared[0] > 10_000, cleared
        assert cleared[1] < cleared[0] / 4, cleared  # some, for holes that are too small

    monkeypatch.setattr(worker, "train", passes)
    run = engine_run("parallel.data=1", "parallel.pipeline=1")
    assert run.go() == 0, run.stderr()


@contextmanager
def a_child_from_before(seconds: float, code: int) -> Iterator[None]:
    """What pyxis leaves to the process that it runs in a container: a child that ends before its exec or soon after."""
    if os.fork() == 0:
        die_with_parent(signal.SIGKILL)
        time.sleep(seconds)
        os._exit(code)
    yield


@pytest.mark.parametrize(
    ("seconds", "code"),
    [(0.0, 3), (0.5, 0), (0.5, 3), (300.0, 3)],
    ids=["failed-at-once", "ended-well-while-ranks-run", "failed-while-ranks-run", "failed-later"],
)
def test_a_child_that_it_did_not_start_says_nothing_of_its_ranks(
    engine_run: Callable[..., EngineRun], seconds: float, code: int
) -> None:
    run = engine_run("parallel.data=2", "parallel.pipeline=1", "train.iterations=2")
    before = time.monotonic()
    assert run.go(a_child_from_before(seconds, code)) == 0, run.stderr()
    assert time.monotonic() - before < 150
    assert run.metrics()[-1]["iteration"] == 2
    assert sorted(entry["rank"] for entry in json.loads(run.run.node_ranks("local-0").read_text())) == [0, 1]


def test_what_nccls_watchdog_ended_is_a_symptom(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run("parallel.data=2", "parallel.pipeline=1")
    plan = json.loads(run.run.plan.read_text())
    run.run.plan.write_text(json.dumps({**plan, "device": "cuda"}))

    def job(_plan: Plan, place: Place, _store: Store) -> None:
        if place.rank == 1:
            recorded = {"process_group": ("0",), "profiling_name": "nccl:all_reduce", "collective_seq_id": 5}
            recorded |= {"retired": False, "state": "started", "is_p2p": False}
            Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}1").write_bytes(pickle.dumps({"entries": [recorded]}))
            faulthandler.disable()  # pytest's
            os.abort()
        time.sleep(60)

    pid = os.fork()
    if pid == 0:
        os._exit(worker.main([str(run.run.plan), "0"], job))
    assert ended(pid) == 1
    (error,) = run.errors()
    assert (error["rank"], error["symptom"]) == (1, True)
    assert "SIGABRT: by torch's watchdog of NCCL" in error["message"]
    assert "flight recorder: nccl:all_reduce number 5 of group 0, started, has not ended" in error["message"]
