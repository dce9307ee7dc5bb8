"""The processes of a node's ranks: forked from one that has imported torch, watched, and ended together.

Why one ended is written to errors/rank-*.json, and as a line to its stderr.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, Optional

from megatron_ext.contract.errors import KILLED, EngineError, PeerLost, RankFailure, address_space_left, shortage
from megatron_ext.contract.files import write_json
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.rules.engine import MEGATRON_CORE, MEGATRON_LM
from megatron_ext.contract.worker import AGENT, SAVED, die_with_parent, keep_freed_memory, start_of_run
from megatron_ext.core import library
from megatron_ext.parallel import interruption
from megatron_ext.parallel.interruption import Interrupted
from megatron_ext.timeline import flight, usage
from megatron_ext.timeline.progress import STOPPED, Board
from megatron_ext.timeline.stacks import Stacks

MIN_ADDRESS_SPACE = 2**30
"""Some dozen threads of a rank reserve as much; the C++ library ends a rank that cannot have one, without a reason."""


def report(plan: Plan, place: Place, error: BaseException, symptom: bool) -> None:
    _report_as(plan, place, type(error).__name__, str(error), traceback.format_exc(), symptom)


def report_killed(plan: Plan, place: Place, signum: int, kernel_kills: int, at: str = "") -> None:
    """`at` is where in Python a fault of the rank's own has killed it."""
    name = signal.Signals(signum).name
    message = f"killed by {name}{f' in {at}' if at else ''}{_hint(plan, signum, kernel_kills)}"
    if _by_watchdog(plan, signum) and (told := flight.of_file(_recording(plan, place.rank))):
        message += f" (its flight recorder: {told})"
    print(f"[{place}] error: {message}", file=sys.stderr, flush=True)
    _report_as(plan, place, KILLED, message, "", symptom=_by_watchdog(plan, signum))


def _hint(plan: Plan, signum: int, kernel_kills: int) -> str:
    """`kernel_kills` are those for want of memory since the ranks were started."""
    if _by_watchdog(plan, signum):
        return ": by torch's watchdog of NCCL, because a message failed or took too long, or a kernel failed"
    if signum != signal.SIGKILL:
        room = address_space_left()  # of this process, with which a rank begins
        if room is None or room > MIN_ADDRESS_SPACE:
            return ""
        return f": probably out of memory: ulimit -v leaves a rank {room // 2**20} MiB when it starts"
    if kernel_kills:
        return f": out of memory: since the ranks started, the kernel has killed {kernel_kills} on this node for that"
    return ": by somebody, or by the kernel because memory ran out"


def _recording(plan: Plan, rank: object) -> Path:
    """What torch's flight recorder writes of a rank; its prefix for all of them with the empty text."""
    return plan.files.rank_error(0).with_name(f"flight-{rank}")


def _by_watchdog(plan: Plan, signum: int) -> bool:
    """It ends its own process when another one is lost. A failed kernel comes to light there, too: where no other
    rank tells a cause, the one that tells this first had it."""
    return signum == signal.SIGABRT and plan.device == "cuda"


def _report_as(plan: Plan, place: Place, kind: str, message: str, trace: str, symptom: bool) -> None:
    failure = RankFailure(
        rank=place.rank,
        stage=place.stage,
        dp=place.dp,
        tp=place.tp,
        node=plan.nodes[place.node].name,
        start=start_of_run(),
        unix=time.time(),
        type=kind,
        message=message,
        traceback=trace,
        symptom=symptom,
    )
    write_json(plan.files.rank_error(place.rank), vars(failure))


@contextmanager
def name_memory_errors() -> Iterator[None]:
    """Turns the many errors by which memory or threads run out into one message."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        lack = shortage(error)
        if lack is None:
            raise
        raise EngineError(lack) from error


GRACE_S = 3.0
"""Seconds between asking ranks to end and killing them."""
LOOK_S = 5.0
"""Between two looks at what the ranks are doing."""
STILL_S = 10.0
"""A rank that has done the same thing for this long may stand still."""
ENDING_S = 1.0
"""The same when ranks are ended because one of them failed."""


class Ranks:
    """The ranks of one node: their processes, and the files that tell of them."""

    def __init__(self, plan: Plan, node_rank: int, job: Callable[[Place], None]) -> None:
        """`job` is all that a rank does."""
        if _uses_compiler(plan):
            import torch._dynamo  # noqa: F401  (1.5 CPU seconds: once here, not in every rank)
        if plan.engine in (MEGATRON_CORE, MEGATRON_LM) and plan.device == "cpu":
            library.preload(plan.script)
        self._plan = plan
        self._job = job
        self._places = [plan.ranks[rank] for rank in plan.nodes[node_rank].ranks]
        self._kernel_kills = usage.kernel_kills()
        self._path = plan.files.node_ranks(plan.nodes[node_rank].name)
        self._board = Board([place.rank for place in self._places])
        self._stacks = Stacks([place.rank for place in self._places])
        self._located: Dict[int, Dict[str, Any]] = {}
        """For each pid, where a rank stood still, and since when."""
        self._state: Dict[int, Dict[str, Any]] = {}
        """For each pid, what nodes/<node>.ranks.json says of it."""

    def start(self) -> None:
        """Forks every rank. What an earlier start of the run left behind of errors is no longer true."""
        parent = os.getpid()
        if self._plan.device == "cuda":
            flight.record(_recording(self._plan, ""))
        gc.freeze()  # a rank's garbage collection would write to, and so copy, all memory that it shares with us
        for place in self._places:
            for path in (self._plan.files.rank_error(place.rank), _recording(self._plan, place.rank)):
                path.unlink(missing_ok=True)
            pid = os.fork()
            if pid == 0:
                self._board.take(place.rank)
                self._stacks.take(place.rank)
                if self._plan.train.checkpoint:
                    interruption.listen()
                else:  # it could only end without having saved; that is its agent's to do
                    signal.signal(interruption.SIGNAL, signal.SIG_IGN)
                os._exit(_rank_main(self._plan, place, parent, self._job))
            self._state[pid] = {"rank": place.rank, "pid": pid, "exit_code": None, "ended_unix": None, "doing": None}
        self._publish()

    def forward(self, signum: int, _: Optional[FrameType]) -> None:
        """Hands a signal on to every rank that lives."""
        for pid in self._alive():
            os.kill(pid, signum)

    def wait(self) -> int:
        """Waits until all ranks ended well (0), one failed (1), or all have saved because they were asked to (75)."""
        signal.signal(signal.SIGALRM, self._look_on)
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
        while self._alive():
            if self._reap(block=True):
                return 1
        saved = any(state["exit_code"] == SAVED for state in self._state.values())
        return SAVED if saved else 0

    def look(self) -> Dict[int, Optional[int]]:
        """Exit codes by rank, negative for a signal; None for a rank that lives."""
        self._reap(block=False)
        return {state["rank"]: state["exit_code"] for state in self._state.values()}

    def end(self, *, gently: bool = True) -> None:
        """Ends the ranks that still live, and waits until they are gone; if not `gently`, kills them at once.

        Those that died by themselves are looked at first, so that a rank's own death is not taken for our doing; then
        what the others are doing, which tells who held them up.
        """
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._reap(block=False)
        self._note(self._with_stacks(self._doing(), time.time() - ENDING_S))
        for step in (signal.SIGTERM, signal.SIGKILL) if gently and AGENT not in os.environ else (signal.SIGKILL,):
            for pid in self._alive():
                os.kill(pid, step)
                os.kill(pid, signal.SIGCONT)  # one that was stopped ends only when it goes on
            until = time.monotonic() + GRACE_S
            while self._alive() and (time.monotonic() < until or step is signal.SIGKILL):
                self._reap(block=False, ours=step)
                time.sleep(0.01)

    def _alive(self) -> List[int]:
        return [pid for pid, state in self._state.items() if state["exit_code"] is None]

    def _doing(self) -> Dict[int, Dict[str, Any]]:
        """Returns what the ranks that live are doing, by pid."""
        return {pid: self._board.read(self._state[pid]["rank"], pid) for pid in self._alive()}

    def _look_on(self, _signum: int, _: Optional[FrameType]) -> None:
        """Publishes what the ranks are doing while one of them stands still, and nothing while all go on."""
        doing, before = self._doing(), time.time() - STILL_S
        still = any(each["since_unix"] < before or each["process"] in STOPPED for each in doing.values())
        self._note(self._with_stacks(doing, before) if still else {})

    def _with_stacks(self, doing: Dict[int, Dict[str, Any]], before: float) -> Dict[int, Dict[str, Any]]:
        """The same, with the stacks of ranks that have done the same thing since before a moment. Each is asked once
        for what it does: a rank that is stopped cannot answer."""
        for pid, each in doing.items():
            known = self._located.get(pid)
            if known is not None and known["since_unix"] == each["since_unix"]:
                each.update(known)
            elif each["since_unix"] < before and each["process"] not in STOPPED:
                each.update(self._stacks.ask(self._state[pid]["rank"], pid))
                self._located[pid] = {key: each[key] for key in ("since_unix", "at", "stack")}
        return doing

    def _note(self, doing: Dict[int, Dict[str, Any]]) -> None:
        alive = self._alive()
        if any(self._state[pid]["doing"] != doing.get(pid) for pid in alive):
            for pid in alive:
                self._state[pid]["doing"] = doing.get(pid)
            with suppress(OSError):  # a disk that is full for this ends no run
                self._publish()

    def _reap(self, block: bool, ours: Optional[signal.Signals] = None) -> bool:
        """Notes ranks that ended; waits for one if `block`. True if one failed other than by our signal `ours`."""
        if block:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # a signal to stop may come here: nothing is lost by it
        failed = False
        with signals_blocked():
            while self._alive():
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid not in self._state:  # inherited: pyxis starts a container as a child of what it then runs
                    continue
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                self._state[pid].update(exit_code=code, ended_unix=time.time())
                if ours is None:
                    self._state[pid]["doing"] = None
                if code < 0 and ours is None:
                    kills = usage.kernel_kills() - self._kernel_kills
                    rank = self._state[pid]["rank"]
                    report_killed(self._plan, self._plan.ranks[rank], -code, kills, self._stacks.fault(rank))
                failed = failed or (code not in (0, SAVED) and ours is None)
                self._publish()
        return failed

    def _publish(self) -> None:
        write_json(self._path, sorted(self._state.values(), key=lambda state: state["rank"]))


def _uses_compiler(plan: Plan) -> bool:
    """Whether every rank would import torch's compiler at its first step: torch.utils.checkpoint does, which computes
    again what a layer, or dropped or capped attention, does not keep. Other ranks do without it, and start sooner."""
    if plan.rehearsal is not None:
        return False
    capped = getattr(plan.model, "attention_softcap", None) is not None
    held = plan.model.attention_dropout > 0 or capped  # weights of attention
    again = plan.recompute != "none" or held or plan.model.traits.always_recomputes
    return again or plan.train.compile or plan.device == "cuda"


def _rank_main(plan: Plan, place: Place, parent: int, job: Callable[[Place], None]) -> int:
    """A forked rank, from its first line to its exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if AGENT in os.environ else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the launcher's to handle
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    if plan.device == "cpu":
        keep_freed_memory()
    try:
        with name_memory_errors():
            job(place)
    except Interrupted as interrupted:
        print(f"[{place}] asked to end: {interrupted}", flush=True)
        return SAVED
    except EngineError as error:
        report(plan, place, error, symptom=isinstance(error, PeerLost))
        print(f"[{place}] error: {error}", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:  # noqa: BLE001  (told in full, and the exit code says it)
        report(plan, place, error, symptom=False)
        print(f"[{place}] {traceback.format_exc()}", file=sys.stderr, flush=True)
        return 1
    finally:
        sys.stdout.flush()
    return 0


_SIGNALS = (signal.SIGTERM, signal.SIGINT, interruption.SIGNAL, signal.SIGALRM)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Holds back signals to stop, save or look: none falls between a fork and its entry in the list of ranks."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
