"""python -m benchmarks.stacks: what it costs in CPU time that a rank which hangs can be named, and where it does.

Ranks that multiply matrices have a handler for the question where they are, or none. Beside that: the question itself,
which only a rank gets that has stood still for ten seconds; a look at what a rank does, every five seconds; and the
note that a rank makes of each wait for another one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from megatron_ext.rank_processes import LOOK_S, STILL_S
from megatron_ext.timeline.progress import Board, Wait
from megatron_ext.timeline.stacks import Stacks

ROUNDS = 9
PRODUCTS = 600
OF = 200
"""Rows and columns of a matrix."""
ASKS = 50
WAITS = 20_000


def work() -> float:
    """CPU seconds of a rank's work."""
    matrix, began = torch.ones(OF, OF), time.process_time()
    for _ in range(PRODUCTS):
        matrix @ matrix
    return time.process_time() - began


def in_a_rank(stacks: Stacks | None, does: Callable[[], object]) -> None:
    """Runs it in a forked process, which stacks can be asked of."""
    pid = os.fork()
    if pid == 0:
        if stacks is not None:
            stacks.take(0)
        does()
        os._exit(0)
    os.waitpid(pid, 0)


def seconds(stacks: Stacks | None) -> float:
    reads, writes = os.pipe()
    in_a_rank(stacks, lambda: os.write(writes, f"{work()}\n".encode()))
    found = float(os.read(reads, 64))
    os.close(reads)
    os.close(writes)
    return found


def asked_s(stacks: Stacks) -> float:
    """CPU seconds of a rank's that one question takes it: it sleeps but for these."""
    pid = os.fork()
    if pid == 0:
        stacks.take(0)
        while True:
            time.sleep(100)
    time.sleep(0.3)
    ticks = [_cpu_ns(pid)]
    for _ in range(ASKS):
        stacks.ask(0, pid)
    ticks.append(_cpu_ns(pid))
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return (ticks[1] - ticks[0]) / ASKS / 1e9


def each_s(count: int, does: Callable[[], object]) -> float:
    """CPU seconds that it takes, the mean of many."""
    began = time.process_time()
    for _ in range(count):
        does()
    return (time.process_time() - began) / count


def wait() -> None:
    with Wait("activations from rank 1"):
        pass


def _cpu_ns(pid: int) -> int:
    with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[0])


def main() -> None:
    torch.set_num_threads(1)
    stacks = Stacks([0])
    pairs = [(seconds(None), seconds(stacks)) for _ in range(ROUNDS)]
    without, ready = (statistics.median(each) for each in zip(*pairs, strict=True))
    asked, board = asked_s(stacks), Board([0])
    board.take(0)
    look, noted = each_s(1000, lambda: board.read(0, os.getpid())), each_s(WAITS, wait)
    print(f"{PRODUCTS} products: {without * 1e3:.1f} ms, with a handler that nobody asks {ready / without - 1:+.2%}")
    print(f"a question: {asked * 1e6:.0f} us of the rank, {asked / STILL_S:.4%} of the time that it stood still")
    print(f"a look: {look * 1e6:.0f} us a rank, {look / LOOK_S:.4%} of a core")
    print(f"a note of a wait: {noted * 1e6:.1f} us, 0.1 % of a pass and its message of {noted * 1e6:.1f} ms")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
