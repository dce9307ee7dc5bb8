"""python -m megatron_ext.profile PLAN.json NODE_RANK: measures what a model's parts take on the ranks of one node.

It runs ranks as `megatron_ext.worker` does, with its exit codes. TDPP_PROFILE in the environment says what is to be
measured; what was found goes to profile/rank-*.json in the run's folder (docs/formats.md). All ranks go from one
measurement to the next together: a node's GPUs work at the same time, as they do when they train.
"""

from __future__ import annotations

import gc
import platform
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext import worker
from megatron_ext.contract.errors import is_out_of_memory, reason_of
from megatron_ext.contract.files import GrowingNote, read_note
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.rules.engine import MEGATRON_CORE
from megatron_ext.contract.run_files import RunFiles
from megatron_ext.core import parts as core_parts
from megatron_ext.measuring import link_times
from megatron_ext.measuring.kinds import CoreParts, Kinds
from megatron_ext.measuring.passes import Parts, Passes, groups_of, medians_by_part
from megatron_ext.measuring.request import Request
from megatron_ext.measuring.room import HostMemory, Room, doubled, largest
from megatron_ext.measuring.steps import Copies
from megatron_ext.parallel.comm import annotate_errors, meet, new_group
from megatron_ext.parallel.meeting import check_same_software
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.train import device_of

WARM_UP_S = 0.3
"""Seconds of passes that do not count, and one round at least: a GPU raises its clock, a CPU finds its memory."""
ROUND = 5
"""Passes between two looks at whether they suffice."""
ROOM = ("room", "room_short_of", "gradients")
STEPS = ("steps", "steps_done", "host", "memory_bytes", "gradients")
"""Keys of a note that belong together."""


def measure(plan: Plan, place: Place, store: Store) -> None:
    """Joins the other ranks at `store` and measures everything that is asked for."""
    torch.set_num_threads(1)
    request = Request.read()
    device = device_of(plan, place)
    check_same_software(store, place.rank, plan.world_size, device)
    meet(store, place.rank, plan.world_size, device, timedelta(seconds=plan.train.comm_timeout_s))
    path = plan.files.profile_rank(place.rank)
    path.parent.mkdir(exist_ok=True)
    note = GrowingNote(path, device=_device_name(device), versions=_versions(device, plan))
    _Measurements(plan, place, request, device, note).make()
    with annotate_errors("leaving the other ranks"):
        dist.barrier()
    dist.destroy_process_group()


class _Measurements:
    """All that one rank measures, in step with the others."""

    def __init__(self, plan: Plan, place: Place, request: Request, device: torch.device, note: GrowingNote) -> None:
        self._plan = plan
        self._place = place
        self._request = request
        self._device = device
        self._note = note
        self._nodes = [node.ranks for node in plan.nodes]
        self._points: List[Dict[str, Any]] = []
        self._host: Optional[HostMemory] = None
        """None on a GPU, and where nothing is tried."""
        self._known: Dict[str, Any] = {}
        """What this rank finished in an earlier job."""
        if request.earlier is not None:
            self._known = read_note(RunFiles(Path(request.earlier)).profile_rank(place.rank)) or {}
        self._durations: List[float] = []
        self._begun: Optional[float] = None

    def _begin(self, doing: str, left: int, of: int, **at: Any) -> None:
        """Notes what is measured now, of how many such measurements, and for how long that goes on if each takes as
        long as those before, or at most as long as was asked for."""
        now = time.monotonic()
        if self._begun is not None:
            self._durations.append(now - self._begun)
        self._begun = now
        each = sum(self._durations) / len(self._durations) if self._durations else self._request.seconds
        self._note.update(doing=doing, at=at or None, number=of - left + 1, of=of, left_s=round(each * left))

    def _agreed(self, value: int, operation: Any) -> int:
        """The least or the most that any rank says; of a truth, whether all or any of them say so."""
        every = torch.tensor([value], device=self._device)
        with annotate_errors("agreeing with the other ranks"):
            dist.all_reduce(every, op=operation)
        return int(every.item())

    def make(self) -> None:
        if self._device.type != "cuda" and (self._request.room_from is not None or self._request.streams):
            self._host = HostMemory.shared()
        sizes, batches = self._request.padded_vocab_sizes, self._request.micro_batch_sizes
        room = None
        if self._request.room_from is not None:
            self._note.update(doing="the largest micro-batch")
            room = self._room(self._request.room_from)
            batches = doubled(self._request.room_from, self._agreed(room, dist.ReduceOp.MAX))
        of_steps = [batch for batch in batches if room is None or batch <= room] if self._request.streams else []
        of_streams = len(of_steps) * len(self._request.streams)
        of = of_streams + len(sizes) * len(batches) + 1
        left = of - of_streams
        if self._request.streams:
            self._steps(of_steps, of)
        optimizer: Optional[List[float]] = self._known.get("optimizer_ns")
        for tensor in sizes:
            group = self._tensor_group(tensor)
            fits = True
            for batch in batches:
                at = {"what": "point", "tensor": tensor, "micro_batch_size": batch, "samples": batch}
                self._begin(f"tensor {tensor}, micro-batch {batch}", left, of, **at)
                left -= 1
                asked = optimizer is None and tensor == min(sizes)
                fits = fits and not (tensor == 1 and room is not None and batch > max(room, batches[0]))
                found = self._finished(group, tensor, batch)
                if found is None:
                    found = self._point(group if fits else None, tensor, batch, asked)
                if found is not None:  # what is too large makes all larger ones so
                    fits = found["too_large"] is None
                    optimizer = found.pop("optimizer_ns", optimizer)
                    self._points.append(found)
                    self._note.update(points=self._points, optimizer_ns=optimizer)
        self._begin("links", left, of)
        groups = [node.group for node in self._plan.nodes]
        self._note.update(p2p=link_times.p2p(self._nodes, groups, self._device))
        self._note.update(all_reduces=link_times.all_reduces(self._nodes, self._device))
        self._note.update(collectives=link_times.collectives(self._nodes, self._device), doing=None, done=True)

    def _finished(self, group: Optional[TensorGroup], tensor: int, batch: int) -> Optional[Dict[str, Any]]:
        """What an earlier job knows of a tensor size and micro-batch, on all ranks that take part: its measurement, or
        that a rank was killed with it. All ranks ask for the same."""
        size = tensor, batch
        points = self._known.get("points", ())
        known = next((one for one in points if (one["tensor"], one["micro_batch_size"]) == size), None)
        if batch >= self._request.least_killed("point", tensor=tensor):
            known = {"tensor": tensor, "micro_batch_size": batch, "too_large": "Linux killed a rank with this size"}
        if not self._agreed(int(known is not None or group is None), dist.ReduceOp.MIN):
            return None
        if known is not None and "module" in self._known:
            self._note.update(module=self._known["module"])
        return known

    def _room(self, step: int) -> int:
        """The largest micro-batch for which this rank has room, with the whole model and without tensor groups."""
        found, room = 0, None
        if self._agreed(int("room" in self._known), dist.ReduceOp.MIN):
            self._note.update(**{key: self._known[key] for key in ROOM if key in self._known})
            return int(self._known["room"])
        least_killed = self._request.least_killed("room")

        def fits(batch: int) -> bool:
            if batch >= least_killed:
                self._note.update(room_short_of=f"with micro-batches of {least_killed} Linux killed a rank")
                return False
            at = {"what": "room", "micro_batch_size": batch, "samples": batch}
            self._note.update(doing=f"the largest micro-batch, {batch} now", at=at)
            assert room is not None
            return room.fits(batch)

        self._note.update(at={"what": "room", "micro_batch_size": step, "samples": step})
        if step >= least_killed:  # nor is the model itself tried
            self._note.update(room=found, room_short_of=f"with micro-batches of {step} Linux killed a rank")
            return found
        try:
            room = Room(self._alone, self._device, self._memory, self._host)
            if self._host is not None and step > 2:  # what two samples take tells whether `step` is to be tried
                room.fits(2)  # of one alone batch normalization may have no deviation
            found = largest(fits, step)
            if room.short_of is not None:
                self._note.update(room_short_of=room.short_of)
            self._note.update(gradients=room.gradients() if room.fits(step) else [])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        room = None
        self._free()
        self._note.update(room=found, at=None)
        return found

    def _steps(self, batches: Sequence[int], of: int) -> None:
        """Tells what steps of the whole model take on this rank, by micro-batch and copies, as far as there is room."""
        if self._agreed(int("steps_done" in self._known), dist.ReduceOp.MIN):
            self._note.update(**{key: self._known[key] for key in STEPS if key in self._known})
            return
        found: List[Dict[str, Any]] = [*self._known.get("steps", ())]
        finished = [one["micro_batch_size"] for one in found]
        least_killed = self._request.least_killed("streams")
        copies: Optional[Copies] = None
        room: Optional[Room] = None
        left = of
        try:
            copies = Copies(self._alone, self._device, self._memory, self._host)
            for batch in batches:
                times: List[Dict[str, Any]] = []
                left_after = left - len(self._request.streams)
                for streams in self._request.streams if batch not in finished else ():
                    samples = streams * batch
                    if samples >= least_killed:
                        break
                    at = {"what": "streams", "micro_batch_size": batch, "streams": streams, "samples": samples}
                    self._begin(f"{streams} streams with micro-batch {batch}", left, of, **at)
                    left -= 1
                    one = copies.measured(batch, (streams,), self._request.seconds)
                    if not one:
                        break
                    times += one
                left = left_after
                if batch not in finished:
                    found.append({"micro_batch_size": batch, "times": times})
                    self._note.update(steps=found, host=platform.node(), memory_bytes=self._has_bytes)
            copies.close()
            copies = None
            self._free()
            if self._request.room_from is None and batches:  # with which they were told
                room = Room(self._alone, self._device, self._memory, self._host)
                self._note.update(gradients=room.gradients() if room.fits(batches[0]) else [])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        copies = room = None
        self._free()
        self._note.update(steps=found, steps_done=True, host=platform.node(), memory_bytes=self._has_bytes)

    @property
    def _alone(self) -> Plan:
        """For the whole model on a rank, without tensor groups."""
        padded = self._request.padded_vocab_sizes[min(self._request.padded_vocab_sizes)]
        return replace(self._plan, model=replace(self._plan.model, padded_vocab_size=padded))

    @property
    def _memory(self) -> Optional[int]:
        """Bytes that are declared; None on a GPU, whose allocator says when there is no more."""
        group = next(node.group for node in self._plan.nodes if self._place.rank in node.ranks)
        return None if self._device.type == "cuda" else (self._request.memory_bytes or {}).get(group)

    @property
    def _has_bytes(self) -> Optional[int]:
        if self._device.type != "cuda":
            return self._memory
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def _tensor_group(self, size: int) -> Optional[TensorGroup]:
        """This rank's one; None if it is left over. All ranks make each group."""
        if self._plan.engine == MEGATRON_CORE:
            return core_parts.tensor_group(self._plan, size)
        found = None
        for ranks in groups_of(self._nodes, size):
            group = new_group(ranks) if size > 1 else None
            if self._place.rank in ranks:
                found = TensorGroup(size, ranks.index(self._place.rank), group, self._plan.sequence_parallel)
        return found

    def _point(
        self, group: Optional[TensorGroup], tensor: int, batch: int, with_optimizer: bool
    ) -> Optional[Dict[str, Any]]:
        """What is told of one tensor size and micro-batch; None on a rank that takes no part. It leaves memory free."""
        found = self._tried(group, tensor, batch, with_optimizer)
        self._free()
        return None if group is None else found

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _tried(self, group: Optional[TensorGroup], tensor: int, batch: int, with_optimizer: bool) -> Dict[str, Any]:
        model = replace(self._plan.model, padded_vocab_size=self._request.padded_vocab_sizes[tensor])
        trial = Trial(self._request.seconds)
        if group is not None:
            trial.attempt(lambda: trial.begin(self._passes(model, group, batch)))
        while self._agreed(int(trial.wants_more()), dist.ReduceOp.MAX):
            trial.attempt(trial.round)
        found: Dict[str, Any] = {"tensor": tensor, "micro_batch_size": batch, "too_large": trial.too_large}
        if trial.parts is not None:
            found.update(self._told(trial.parts, with_optimizer))
            trial.parts.close()
        return found

    def _passes(self, model: ModelConfig, group: TensorGroup, batch: int) -> Passes:
        if model.traits.measured:
            return Kinds(self._plan, batch, self._device)
        if self._plan.engine == MEGATRON_CORE:
            return CoreParts(self._plan, model, group, batch, self._device)
        return Parts(self._plan, model, group, batch, self._device)

    def _told(self, parts: Passes, with_optimizer: bool) -> Dict[str, Any]:
        known, passes = parts.known(), parts.passes()
        found: Dict[str, Any] = {"parts": medians_by_part(parts.medians(), parts.kept_bytes())}
        found.update(known=known, passes=passes, disturbed=parts.disturbed())
        if isinstance(parts, Kinds):
            self._note.update(module={"digest": self._plan.model.code_digest, **parts.module()})
            found["sequence"] = parts.sequence()
        if isinstance(parts, (Parts, CoreParts)) and self._device.type == "cuda":
            found.update(peak_bytes=parts.peak_bytes(), peak_layers=parts.layers)
        if with_optimizer:
            found["optimizer_ns"] = list(parts.optimizer_ns(self._request.seconds / 2))
        return found


class Trial:
    """Passes of one rank until their times are known; a rank out of memory only keeps step with the others."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun = time.monotonic()
        self._until: Optional[float] = None
        """None while it warms up."""
        self.parts: Optional[Passes] = None
        self.too_large: Optional[str] = None

    def attempt(self, action: Callable[[], None]) -> None:
        """Takes note if there is too little memory for it."""
        try:
            action()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.too_large, self.parts = reason_of(error), None

    def begin(self, parts: Passes) -> None:
        self.parts = parts

    def wants_more(self) -> bool:
        if self.parts is None:
            return False
        return self._until is None or not (self.parts.known() or time.monotonic() > self._until)

    def round(self) -> None:
        if self.parts is None:
            return
        self.parts.forward_and_backward(ROUND)
        if self._until is None and time.monotonic() > self._begun + WARM_UP_S:
            for laps in self.parts.laps.values():
                laps.clear()
            self._until = time.monotonic() + self._seconds


def _versions(device: torch.device, plan: Plan) -> Dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found.update(cuda=str(torch.version.cuda), nccl=".".join(map(str, nccl)))
    return {**found, **(core_parts.versions(plan) if plan.engine == MEGATRON_CORE else {})}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], measure))
