"""Saves the checkpoints of a run, so that a crash at any moment leaves the newest complete one (docs/formats.md)."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Dict, Iterable, Iterator, Mapping, NamedTuple, Optional, Tuple

from torch import Tensor

from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints import tensors as checkpoint
from megatron_ext.checkpoints.header import of_part
from megatron_ext.checkpoints.meta import Meta, written
from megatron_ext.checkpoints.part_files import part_file, part_name
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.run_files import BEST, LATEST, META, checkpoint_name
from megatron_ext.engine.adaptation import FixedBatch
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.parallel.comm import Barrier

Parts = Iterable[Tuple[str, Dict[str, Tensor]]]


class Saver:
    """All ranks call its methods together. Which rank writes a part does not matter: parts appear when complete.

    Rank 0 makes the checkpoint visible once all parts are there. With `train.save_async` a thread writes copies of
    them; it takes part in no communication, and its failure is raised after the next iteration or by `finish`.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        engine: AnyEngine,
        order: Dict[str, float],
        barrier: Barrier,
        adaptation: FixedBatch,
    ) -> None:
        """`order` is that of the run's samples."""
        self._plan = plan
        self._place = place
        self._engine = engine
        self._adaptation = adaptation
        self._order = order
        self._barrier = barrier
        self._folder = plan.files.checkpoints
        self._parts = [part_name(block.name) for block in engine.task.blocks]
        """All parts of the whole model, whichever ranks write them."""
        self._pending: Optional[_Pending] = None

    def after(
        self, iteration: int, ending: bool, evaluation: Optional[Mapping[str, float]] = None, best: bool = False
    ) -> None:
        """Saves if this is due after `iteration`, or if no other iteration follows, or if its evaluation is the best.

        Raises:
            EngineError: this rank could not write its parts, of this or an earlier checkpoint.
            PeerLost: another rank is gone.
        """
        self._look()
        train = self._plan.train
        at_interval = train.save_interval is not None and iteration % train.save_interval == 0
        if train.checkpoint and (at_interval or ending or best or iteration == train.iterations):
            self.finish()
            self._save(iteration, evaluation, best)

    def finish(self) -> None:
        """Waits until what was to be saved is on disk; raises as `after` does."""
        if self._pending is None:
            return
        self._pending.writer.wait()
        name = self._pending.final.name
        self._barrier.wait(f"{name}/written", "waiting for all parts of the checkpoint")
        if self._place.rank == 0:
            self._publish(self._pending)
        self._barrier.wait(f"{name}/published", "ending the checkpoint")
        self._pending = None

    def _save(self, iteration: int, evaluation: Optional[Mapping[str, float]], best: bool) -> None:
        optimizer = self._engine.optimizer
        final = self._folder / checkpoint_name(iteration)
        meta = Meta(
            iteration=iteration,
            consumed_samples=self._engine.consumed(iteration),
            updates=self._engine.updates,
            scaler=optimizer.scaler.state(),
            order=self._order,
            model=self._plan.model.identity(),
            optimizer=self._plan.train.optimizer,
            evaluation=None if evaluation is None else {k: v for k, v in evaluation.items() if math.isfinite(v)},
            adaptation=self._adaptation.state,
        )
        if self._place.rank == 0:
            with _report_unwritable(final):
                for left in self._folder.glob(".iter_*.partial"):
                    shutil.rmtree(left)
                for name in (LATEST, BEST):
                    for left in self._folder.glob(f".{name}.*"):  # by a start that was killed while it wrote it
                        left.unlink()
                _partial(final).mkdir(parents=True)
        self._barrier.wait(f"{final.name}/begun", "starting the checkpoint")
        state = optimizer.state()
        own: Parts = checkpoint.parts(self._engine, state) if self._place.dp == 0 else ()
        if self._plan.train.save_async:
            self._pending = _Pending(final, meta, best, _Writer(_partial(final), iteration, list(own)))
            self._pending.writer.start()
        else:
            self._pending = _Pending(final, meta, best, _Writer(_partial(final), iteration, own))
            self._pending.writer.run()
            self.finish()

    def _look(self) -> None:
        """Raises a failure of the thread's, between iterations; rank 0 publishes what is complete."""
        if self._pending is None:
            return
        self._pending.writer.check()
        if self._place.rank == 0:
            partial = _partial(self._pending.final)
            if all(part_file(partial, part).exists() for part in self._parts):
                self._publish(self._pending)

    def _publish(self, pending: _Pending) -> None:
        """Gives a complete checkpoint its name, makes it the latest, and deletes those no longer wanted."""
        partial, final = _partial(pending.final), pending.final
        if not partial.exists():
            return  # published before
        missing = [part for part in self._parts if not part_file(partial, part).exists()]
        if missing:
            raise EngineError(f"checkpoint {final}: not made the latest, because it lacks {', '.join(missing)}")
        parts = written(partial, self._parts, pending.meta.iteration)
        with _report_unwritable(final):
            _write(partial / META, replace(pending.meta, parts=parts).as_json())
            _sync(partial)
            _delete(final)  # left by an earlier start of the run that never made it the latest
            partial.rename(final)
            _sync(self._folder)
            for name in (LATEST, BEST) if pending.best else (LATEST,):
                write_atomic(self._folder / name, final.name + "\n")
            _sync(self._folder)
            kept = {final.name, self._best()}
            for old in sorted(self._folder.glob("iter_*"))[: -self._plan.train.keep_checkpoints]:
                if old.name not in kept:
                    _delete(old)
        print(f"checkpoint saved: {final}", flush=True)

    def _best(self) -> Optional[str]:
        """The name of the best checkpoint."""
        best = self._folder / BEST
        return best.read_text(encoding="utf-8").strip() if best.is_file() else None


class _Writer(Thread):
    """Writes parts, as a thread or, by `run()`, at once."""

    def __init__(self, folder: Path, iteration: int, parts: Parts) -> None:
        super().__init__(daemon=True)
        self._to = folder
        self._iteration = iteration
        self._parts = parts
        self._error: Optional[BaseException] = None

    def run(self) -> None:
        try:
            for part, tensors in self._parts:
                safetensors.write(part_file(self._to, part), tensors, of_part(part, self._iteration))
        except BaseException as error:  # noqa: BLE001  (raised by `check`, on the thread that waits for it)
            self._error = error
        self._parts = ()

    def wait(self) -> None:
        """Waits until all is written; raises what went wrong."""
        if self.is_alive():
            self.join()
        self.check()

    def check(self) -> None:
        """Raises what went wrong so far."""
        if self._error is not None:
            raise self._error


class _Pending(NamedTuple):
    """A checkpoint that is being written."""

    final: Path
    meta: Meta
    best: bool
    """Whether it is the best of those evaluated so far."""
    writer: _Writer


@contextmanager
def _report_unwritable(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(f"checkpoint {final}: cannot be written: {error}") from error


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def _delete(folder: Path) -> None:
    """Deletes it so that it never stands under its name with a part of its files only."""
    if folder.exists():
        doomed = _partial(folder).with_suffix(".old.partial")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Has the names in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
