"""Saves the checkpoints of a run, so that a crash at any moment leaves the newest complete one (docs/formats.md)."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Dict, Iterable, Iterator, Mapping, NamedTuple, Optional, Tuple

from torch import Tensor

from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints import tensors as checkpoint
from megatron_ext.checkpoints.header import of_part, part_file, part_name, parts_of_islands
from megatron_ext.checkpoints.meta import Meta, written
from megatron_ext.checkpoints.pace import SavePace
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.run_files import BEST, LATEST, META, checkpoint_name
from megatron_ext.engine.adaptation import FixedBatch
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.parallel.comm import Barrier

Parts = Iterable[Tuple[str, Dict[str, Tensor]]]


@dataclass(eq=False)
class Saver:
    """All ranks call its methods together. Which rank writes a part does not matter: parts appear when complete.

    Rank 0 makes the checkpoint visible once all parts are there. With `train.save_async` a thread writes copies of
    them; it takes part in no communication. A checkpoint that cannot be written is reported and given up by all ranks,
    and training goes on; only one that `must` be there, for nothing follows, ends the run.
    """

    _plan: Plan
    _place: Place
    _engine: AnyEngine
    _order: Dict[str, float]
    """That of the run's samples."""
    _barrier: Barrier
    _adaptation: FixedBatch
    _pace: Optional[SavePace] = None
    """On one rank, it is told what was saved."""

    def __post_init__(self) -> None:
        self._folder = self._plan.files.checkpoints
        names = [part_name(block.name) for block in self._engine.task.blocks]
        self.parts = parts_of_islands(names, self._engine.island[1])
        """All parts of the whole model, whichever ranks write them."""
        self._pending: Optional[_Pending] = None
        self._unpublished: Optional[EngineError] = None
        """Why rank 0 could not publish what is pending."""

    def after(
        self,
        iteration: int,
        ending: bool,
        evaluation: Optional[Mapping[str, float]] = None,
        best: bool = False,
        wanted: bool = False,
        must: bool = False,
    ) -> bool:
        """Saves if this is due after `iteration` or `wanted`, or if no other iteration follows, or if its evaluation is
        the best. Returns whether it tried.

        Raises:
            EngineError: this rank could not write its parts of a checkpoint that `must` be there.
            PeerLost: another rank is gone.
        """
        # Between iterations, rank 0 publishes what is complete.
        if self._pending is not None and self._place.rank == 0:
            partial = _partial(self._pending.final)
            if all(part_file(partial, part).exists() for part in self.parts):
                self._unpublished = self._published(self._pending)
        train = self._plan.train
        at_interval = train.save_interval is not None and iteration % train.save_interval == 0
        must = must or iteration == train.iterations
        due = train.checkpoint and (at_interval or ending or best or wanted or must)
        if due:
            began = time.monotonic()
            self.finish()
            saved = self._save(iteration, evaluation, best, must)
            if self._pace is not None:
                self._pace.tried(iteration, time.monotonic() - began, saved)
                print(self._pace.describe(), flush=True)
        return due

    def finish(self) -> bool:
        """Waits until what was to be saved is on disk. Returns whether it is, and raises as `after` does."""
        if self._pending is None:
            return True
        pending, self._pending = self._pending, None
        name = pending.final.name
        failed = pending.writer.wait()
        if failed is not None:
            _give_up(failed, pending.must)
        saved = self._barrier.all_succeeded(
            f"{name}/written", "waiting for all parts of the checkpoint", failed is not None
        )
        if not saved:
            self._clear_up(pending.final)
            return False
        failed = self._unpublished or (self._published(pending) if self._place.rank == 0 else None)
        self._unpublished = None
        return self._barrier.all_succeeded(f"{name}/published", "ending the checkpoint", failed is not None)

    def _clear_up(self, final: Path) -> None:
        """Makes room: what was written of it is of no use."""
        if self._place.rank == 0:
            shutil.rmtree(_partial(final), ignore_errors=True)

    def _published(self, pending: _Pending) -> Optional[EngineError]:
        """What went wrong, if it did and the run goes on."""
        try:
            self._publish(pending)
        except EngineError as error:
            _give_up(error, pending.must)
            self._clear_up(pending.final)
            return error
        return None

    def _begun(self, final: Path, must: bool) -> bool:
        """Whether there is a folder for it, the same on all ranks."""
        failed = False
        if self._place.rank == 0:
            try:
                self._make_folder(final)
            except EngineError as error:
                _give_up(error, must)
                failed = True
        return self._barrier.all_succeeded(f"{final.name}/begun", "starting the checkpoint", failed)

    def _make_folder(self, final: Path) -> None:
        with _report_unwritable(final):
            for left in self._folder.glob(".iter_*.partial"):
                shutil.rmtree(left)
            for name in (LATEST, BEST):
                for left in self._folder.glob(f".{name}.*"):  # by a start that was killed while it wrote it
                    left.unlink()
            _partial(final).mkdir(parents=True)

    def _save(self, iteration: int, evaluation: Optional[Mapping[str, float]], best: bool, must: bool) -> bool:
        """Returns whether it is on disk, or being written."""
        final = self._folder / checkpoint_name(iteration)
        meta = self.meta(iteration, evaluation)
        if not self._begun(final, must):
            return False
        state = self._engine.optimizer.state()
        own: Parts = checkpoint.parts(self._engine, state) if self._engine.saves else ()
        if self._plan.train.save_async:
            self._pending = _Pending(final, meta, best, must, _Writer(_partial(final), iteration, list(own)))
            self._pending.writer.start()
            return True
        self._pending = _Pending(final, meta, best, must, _Writer(_partial(final), iteration, own))
        self._pending.writer.run()
        return self.finish()

    def meta(self, iteration: int, evaluation: Optional[Mapping[str, float]] = None) -> Meta:
        """What a checkpoint after an iteration says of itself, but for its parts."""
        return Meta(
            iteration=iteration,
            consumed_samples=self._engine.consumed(iteration),
            updates=self._engine.updates,
            scaler=self._engine.optimizer.scaler.state(),
            order=self._order,
            model=self._plan.model.identity(),
            optimizer=self._plan.train.optimizer,
            evaluation=None if evaluation is None else {k: v for k, v in evaluation.items() if math.isfinite(v)},
            adaptation=self._adaptation.state,
            adapters=self._plan.train.adapters,
        )

    def _publish(self, pending: _Pending) -> None:
        """Gives a complete checkpoint its name, makes it the latest, and deletes those no longer wanted."""
        partial, final = _partial(pending.final), pending.final
        if not partial.exists():
            return  # published before
        missing = [part for part in self.parts if not part_file(partial, part).exists()]
        if missing:
            raise EngineError(f"checkpoint {final}: not made the latest, because it lacks {', '.join(missing)}")
        parts = written(partial, self.parts, pending.meta.iteration)
        with _report_unwritable(final):
            _write(partial / META, replace(pending.meta, parts=parts).as_json())
            _sync(partial)
            _delete(final)  # left by an earlier start of the run that never made it the latest
            partial.rename(final)
            _sync(self._folder)
            for name in (LATEST, BEST) if pending.best else (LATEST,):
                write_atomic(self._folder / name, final.name + "\n")
            _sync(self._folder)
            best = self._folder / BEST
            kept = {final.name, best.read_text(encoding="utf-8").strip() if best.is_file() else None}
            for old in sorted(self._folder.glob("iter_*"))[: -self._plan.train.keep_checkpoints]:
                if old.name not in kept:
                    _delete(old)
        print(f"checkpoint saved: {final}", flush=True)


class _Writer(Thread):
    """Writes parts, as a thread or, by `run()`, at once."""

    def __init__(self, folder: Path, iteration: int, parts: Parts) -> None:
        super().__init__(daemon=True)
        self._to = folder
        self._iteration = iteration
        self._parts = parts
        self._error: Optional[BaseException] = None
        """What went wrong, for `wait`."""

    def run(self) -> None:
        try:
            for part, tensors in self._parts:
                safetensors.write(part_file(self._to, part), tensors, of_part(part, self._iteration))
        except BaseException as error:  # noqa: BLE001  (for the thread that waits)
            self._error = error
        self._parts = ()

    def wait(self) -> Optional[EngineError]:
        """Waits until all is written; returns why that failed, and raises what is no matter of the disk."""
        if self.is_alive():
            self.join()
        if self._error is None or isinstance(self._error, EngineError):
            return self._error
        raise self._error


class _Pending(NamedTuple):
    """A checkpoint that is being written."""

    final: Path
    meta: Meta
    best: bool
    """Whether it is the best of those evaluated so far."""
    must: bool
    writer: _Writer


def _give_up(error: EngineError, must: bool) -> None:
    """Says that a checkpoint is not to be had; raises the error where it must."""
    if must:
        raise error
    print(f"not saved, and the run goes on: {error}", file=sys.stderr, flush=True)


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
