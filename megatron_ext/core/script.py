"""A checkout's pretrain_gpt.py as what a rank does (engine=megatron_lm): it trains, and tdpp's timers look on.

The ranks have met before it begins, so that it makes no process group of its own. Of what it has, three things are
changed: the class of its timers, the one of its messages between stages, and the signal at which it saves and ends.
Beside these, its `training_log` is listened to, which each rank calls after each iteration.
"""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.contract.checkout import fault
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.core import on_cpu
from megatron_ext.core.timeline import Timers, Turns, peers, recorded, sums_of
from megatron_ext.engine.log import TrainingLog, Unlogged
from megatron_ext.engine.results import Progress, StepResult
from megatron_ext.parallel import interruption, meeting
from megatron_ext.parallel.comm import Barrier
from megatron_ext.timeline import usage
from megatron_ext.timeline.progress import iterates
from megatron_ext.timeline.recorder import Recorder, traced
from megatron_ext.timeline.usage import MemoryReport

TRACKER = "latest_checkpointed_iteration.txt"
"""In a folder of Megatron-LM's checkpoints: the iteration of the newest one that is complete."""
_WHOLE, _SAVES = "forward-backward", "save-checkpoint"
"""Its timers of an iteration's passes, and, at the beginning of the name, of saving."""


class Script:
    """The script on one rank, which has met the others at `store`."""

    def __init__(
        self, plan: Plan, place: Place, recorder: Recorder, store: Store, unlogged: Optional[Unlogged]
    ) -> None:
        assert plan.script is not None
        self._path, *self._options = plan.script
        self._plan, self._place, self._recorder, self._store = plan, place, recorder, store
        self._unlogged = unlogged
        self._iteration = self._started = 0
        self._timers = Timers(recorder, sums_of(plan, place))
        self._under_way: Optional[ExitStack] = None
        """What lasts as long as the iteration."""
        self._saves = False
        """Whether a checkpoint was begun that is not known to be complete."""
        self._log: Optional[TrainingLog] = None

    def run(self) -> int:
        """Trains, and returns the last iteration. Raises EngineError: the script or megatron.core is not there, or it
        ends in other ways than by its end."""
        plan, place = self._plan, self._place
        if (lack := fault(plan.script or ())) is not None:
            raise EngineError(lack)
        sys.path.insert(0, str(Path(self._path).parent))  # before an installed megatron-core: it brings its own
        with _naming_what_is_missing(self._path):
            if plan.device == "cpu":
                on_cpu.begin_script(len(plan.nodes[place.node].ranks))
            self._change()
        self._memory = MemoryReport(plan, place)
        meeting.align_clocks(self._recorder, self._store, "begin")
        self._recorder.traffic.begin()
        os.environ.update(self._environment())
        sys.argv = [self._path, *self._options]
        try:
            with _naming_what_is_missing(self._path):
                runpy.run_path(self._path, run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise EngineError(f"{self._path} ended itself with {ended.code}; what it printed says why") from ended
        except RuntimeError as error:
            self._timers.failed(error)
            raise
        if not self._iteration:
            raise EngineError(f"{self._path} ended before its first iteration; what it printed says why")
        self._ended()
        return self._iteration

    def _environment(self) -> Dict[str, str]:
        """What torchrun would tell a rank. Nobody listens at the address: the ranks have met."""
        plan, place = self._plan, self._place
        return {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(plan.world_size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(len(plan.nodes[place.node].ranks)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }

    def _change(self) -> None:
        """Puts what tdpp has in the place of Megatron-LM's own."""
        schedules: Any = import_module("megatron.core.pipeline_parallel.schedules")
        signals: Any = import_module("megatron.training.dist_signal_handler")
        variables: Any = import_module("megatron.training.global_vars")
        training: Any = import_module("megatron.training.training")
        communicator = recorded(self._recorder, self._timers) if self._plan.timeline else None
        if communicator is not None:
            schedules.P2PCommunicator = communicator
        self._timers_tell = communicator is None and self._plan.pipeline > 1
        handler = signals.DistributedSignalHandler
        handler.__init__ = lambda own, *_: setattr(own, "sig", interruption.SIGNAL)
        handler.__enter__ = _remembering(handler.__enter__)
        variables.Timers = _timers_class(variables.Timers, self)
        training.training_log = self._listening(training.training_log)
        self._variables = variables

    def _listening(self, log: Callable[..., Any]) -> Callable[..., Any]:
        names = inspect.signature(log)

        @wraps(log)
        def training_log(*values: Any, **named: Any) -> Any:
            given = names.bind(*values, **named).arguments
            found = log(*values, **named)
            self._after(given)
            return found

        return training_log

    def timed(self, name: str, starts: bool) -> None:
        """Called where Megatron-LM starts or stops a timer."""
        if name == _WHOLE and starts:
            self._begin()
        elif name.startswith(_SAVES) and not starts:
            self._saves = True
        elif starts:
            self._timers.start(name)
        else:
            self._timers.stop(name)

    def _begin(self) -> None:
        """An iteration begins."""
        plan, args = self._plan, self._variables.get_args()
        self._end_iteration()
        self._iteration = self._recorder.iteration = args.curr_iteration + 1
        if self._log is None:
            self._started = self._iteration - 1
            if self._place.rank == plan.world_size - 1:
                self._log = TrainingLog(plan, plan.files.metrics, self._started, unlogged=self._unlogged, shows=False)
        iterates(self._iteration)
        if self._timers_tell:
            self._timers.peers = peers()
        count = import_module("megatron.core.num_microbatches_calculator").get_num_microbatches()
        group = getattr(args, "microbatch_group_size_per_vp_stage", None)
        self._timers.turns = Turns(plan, self._place, range(count), group)
        self._under_way = ExitStack()
        self._under_way.enter_context(traced(plan, self._place, self._iteration))
        self._under_way.enter_context(self._recorder.iterates())

    def _end_iteration(self) -> None:
        self._timers.finish()
        self._timers.turns = None
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    def _after(self, given: Mapping[str, Any]) -> None:
        """An iteration has ended; `given` is what Megatron-LM logs of it, by its names."""
        plan, iteration = self._plan, self._iteration
        self._end_iteration()
        if self._log is not None:
            losses, norm = given["loss_dict"], given["grad_norm"]
            skipped = bool(given["skipped_iter"])
            result = StepResult(
                loss=float(losses["lm loss"]) if "lm loss" in losses else None,
                grad_norm=None if norm is None else float(norm),
                loss_scale=float(given["loss_scale"]),
                skipped=skipped,
            )
            args = self._variables.get_args()
            progress = Progress(args.consumed_train_samples, plan.global_batch_size, given["learning_rate"] or 0.0)
            self._log.add(iteration, result, progress, last=iteration == plan.train.iterations)
        self._recorder.flush()
        self._memory.note(iteration)
        if iteration == min(self._started + plan.train.log_interval, plan.train.iterations):
            self._report()
        if self._saves:
            self._note_saved()

    def _report(self) -> None:
        self._memory.report(self._iteration)
        samples = (self._iteration - self._started) * self._plan.global_batch_size
        usage.report_traffic(self._plan, self._place, self._recorder.traffic, self._iteration, samples)

    def _note_saved(self) -> None:
        """Has rank 0 name the newest checkpoint that is complete as tdpp does, for whoever looks at the run."""
        files, tracker = self._plan.files, self._plan.files.checkpoints / TRACKER
        if self._place.rank or not tracker.is_file():
            return
        said = tracker.read_text(encoding="utf-8").strip()
        name = f"iter_{int(said):07d}" if said.isdigit() else None
        if name is not None and (not files.latest_checkpoint.is_file() or files.latest_checkpoint.read_text() != name):
            write_atomic(files.latest_checkpoint, name)
            self._saves = False

    def _ended(self) -> None:
        self._end_iteration()
        self._note_saved()
        Barrier(self._store, self._plan.world_size).wait("trained", "waiting for the other ranks' end")
        meeting.align_clocks(self._recorder, self._store, "end")
        self._recorder.close()
        self._report()


@contextmanager
def _naming_what_is_missing(path: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise EngineError(
            f"{path} needs the module {error.name}, which {sys.executable} does not have; install it where the ranks "
            "run, use a container that has it (container.image), or give another checkout"
        ) from error


def _remembering(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Has a signal count that came before Megatron-LM listened to it."""

    def entering(handler: Any) -> Any:
        found = enter(handler)
        handler._signal_received = interruption.asked()
        return found

    return entering


def _timers_class(theirs: Any, script: Script) -> Any:
    """Megatron-LM's own class, whose timers tell the script when they start and stop: also those that its
    `--timing-log-level` leaves out, which wait for nothing."""

    class Timer:
        def __init__(self, name: str, own: Any) -> None:
            self._name, self._own = name, own

        def start(self, *values: Any, **named: Any) -> None:
            self._own.start(*values, **named)
            script.timed(self._name, True)

        def stop(self, *values: Any, **named: Any) -> None:
            script.timed(self._name, False)
            self._own.stop(*values, **named)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._own, name)

    class Listening(theirs):  # type: ignore[misc]
        def __call__(self, name: str, log_level: Optional[int] = None) -> Any:
            return Timer(name, super().__call__(name, log_level))

    return Listening
