"""The largest micro-batch for which a rank has room, with the whole model and its optimizer: found by trying.

On a GPU its allocator says when there is none. A CPU would take the machine's memory; what a rank has there is
declared, and what it needs is counted: weights, gradients, the optimizer's values, and what autograd keeps.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

from megatron_ext.contract.errors import is_out_of_memory, reason_of
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.optimizer.optimizer import Optimizer
from megatron_ext.families.tasks import task_of
from megatron_ext.measuring.passes import SavedTensors
from megatron_ext.parallel.comm import annotate_errors
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.stage import Stage, backward
from megatron_ext.tasks.task import DTYPES, Micro
from megatron_ext.timeline.recorder import Recorder

USED = 0.9
"""The part of what is available when measuring begins that is used; the rest is left to other processes."""
MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


class HostMemory:
    """The memory of one rank, which may grow by `may_grow_bytes` in all."""

    def __init__(self, may_grow_bytes: int, ranks: int = 1) -> None:
        self._most = peak_bytes() + may_grow_bytes
        self._ranks = ranks
        self._begun: Optional[int] = None
        self._tried: Tuple[int, int] = (0, 0)

    @classmethod
    def shared(cls) -> HostMemory:
        """An equal part for each rank of this host, before any of them takes more; all ranks of the run call this."""
        own = torch.tensor(list(BOOT_ID.read_bytes()), dtype=torch.uint8)
        hosts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        with annotate_errors("agreeing with the other ranks"):
            dist.all_gather(hosts, own)
            available = available_bytes()
            dist.barrier()
        ranks = sum(torch.equal(host, own) for host in hosts)
        return cls(int(USED * available / ranks), ranks)

    def begin(self, fixed_bytes: int) -> None:
        """What is tried from here on takes `fixed_bytes` at any size, and beyond them as much as its size says."""
        self._begun = peak_bytes() + fixed_bytes
        self._tried = (0, 0)

    def require(self, size: int) -> None:
        """Raises MemoryError if `size` is expected to take more than this rank may."""
        assert self._begun is not None
        tried, took = self._tried
        expected = self._begun + (took * size // tried if tried else 0)
        if expected > self._most:
            raise MemoryError(
                f"out of memory: {expected / 2**30:.1f} GiB would be needed, and of this host's memory each of its "
                f"{self._ranks} ranks may take {self._most / 2**30:.1f} GiB"
            )

    def tried(self, size: int) -> None:
        """`size` has just been tried."""
        assert self._begun is not None
        if size > self._tried[0]:
            self._tried = (size, max(0, peak_bytes() - self._begun))


def peak_bytes() -> int:
    """The most that this process has had in memory."""
    lines = STATUS.read_text(encoding="ascii").splitlines()  # getrusage counts the parent's, too
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def available_bytes() -> int:
    """What processes of this host and of this process's control groups can take now without swapping."""
    lines = MEMINFO.read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_left_by_groups()])


def _left_by_groups() -> Iterator[int]:
    """Returns what each limit of a control group leaves this process, in version 1 or 2."""
    for line in OWN_GROUPS.read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, file = GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            file = "total_inactive_file"
        else:
            continue
        own = top / path.lstrip("/")
        for group in (own, *own.parents):
            if group == GROUPS.parent:
                break
            most = _read(group / limit)
            if most.isdigit():  # not `max`
                cached = dict(line.split() for line in _read(group / "memory.stat").splitlines()).get(file, 0)
                yield max(0, int(most) - int(_read(group / used)) + int(cached))


def _read(path: Path) -> str:
    """Nothing where there is no such file: in the topmost group, or where a container hides the groups."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


MOST = 2**16
"""A micro-batch beyond which nobody looks."""
ADAM_BYTES = 8
"""Bytes of Adam's state for a parameter."""


def largest(fits: Callable[[int], bool], step: int) -> int:
    """The largest multiple of `step` that fits, if all smaller ones do; 0 if `step` itself does not."""
    if not fits(step):
        return 0
    good, bad = 1, 2
    while bad * step <= MOST and fits(bad * step):
        good, bad = bad, 2 * bad
    if bad * step > MOST:
        return good * step
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle * step) else (good, middle)
    return good * step


def doubled(step: int, most: int) -> List[int]:
    """`step`, twice as much and so on up to `most`, and that itself; `step` in any case."""
    found = [step]
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return found + [most] * (most > found[-1])


def needed_bytes(flat: FlatWeights, kept: SavedTensors, copies: int = 1) -> int:
    """Returns the bytes of a rank that trains so many copies with these weights, each of which has gradients of its own
    and keeps as much for its backward pass."""
    weight, grad = flat.weight, flat.grad
    kept.sizes.pop(weight.untyped_storage().data_ptr(), None)
    return weight.nbytes + fixed_bytes(flat) + copies * (grad.nbytes + sum(kept.sizes.values()))


def fixed_bytes(flat: FlatWeights) -> int:
    """What the optimizer keeps beside these weights."""
    master = 0 if flat.weight.dtype == torch.float32 else 4
    return (ADAM_BYTES + master) * flat.weight.numel()


class WholeModel:
    """A rank that trains the whole model alone, as far as it has memory."""

    def __init__(
        self, plan: Plan, device: torch.device, memory_bytes: Optional[int], host: Optional[HostMemory] = None
    ) -> None:
        """`memory_bytes` is declared, for a device whose allocator does not say, and `host` has it.

        Raises what torch does where there is no room for the model itself.
        """
        self._plan, self._device, self._memory, self._host = plan, device, memory_bytes, host
        self._task = task_of(replace(plan, recompute=Recompute.none))
        self._stage = self._new_stage()
        self._stage.initialise(1)
        dtype = DTYPES[plan.train.precision]
        self._flat = FlatWeights(self._stage.parameters_by_name(), dtype, device)
        self._stage.place(device, dtype)
        self._optimizer = Optimizer(self._flat, plan.train)
        if host is not None:
            host.begin(fixed_bytes(self._flat))

    def _new_stage(self) -> Stage:
        (part,) = cut_between(self._task, [list(self._task.blocks)])
        return Stage(self._task, part, TensorGroup(), {})

    def _example(self, batch: int) -> Micro:
        source = torch.Generator().manual_seed(self._plan.train.seed)
        return self._task.example(batch, source).to(self._device)

    def _lacks(self, samples: int, do: Callable[[], None]) -> Optional[str]:
        """What ran out while so many samples were tried, in words; None where there was enough of it."""
        try:
            if self._host is not None:
                self._host.require(samples)
            do()
            if self._host is not None:
                self._host.tried(samples)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return reason_of(error)
        finally:
            self._clear()
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        return None

    def _clear(self) -> None:
        """Gives up what a trial has left, before memory is freed."""

    def _require(self, kept: SavedTensors, copies: int = 1) -> None:
        """Raises MemoryError where the declared memory is too little for so many copies of the model."""
        needed = needed_bytes(self._flat, kept, copies)
        assert self._memory is not None
        if needed > self._memory:
            raise MemoryError(f"out of memory: {needed} bytes of {self._memory}")


class Room(WholeModel):
    """Tries micro-batches of any size."""

    short_of: Optional[str] = None
    """Memory, as the last size that did not fit said it."""

    def __init__(
        self, plan: Plan, device: torch.device, memory_bytes: Optional[int], host: Optional[HostMemory] = None
    ) -> None:
        super().__init__(plan, device, memory_bytes, host)
        self._arrived: Dict[str, None] = {}
        self._flat.tell(lambda name: self._arrived.setdefault(name))

    def gradients(self) -> List[Tuple[str, int]]:
        """Parameters and their numbers of values, in the order in which the last pass had their gradients."""
        return [(name, self._flat.parameters[name].numel()) for name in self._arrived]

    def fits(self, batch: int) -> bool:
        """Whether two updates with such a micro-batch find memory; the second has the optimizer's values, too."""

        def update() -> None:
            for _ in range(2):
                self._update(batch)

        lacking = self._lacks(batch, update)
        self.short_of = lacking or self.short_of
        return lacking is None

    def _update(self, batch: int) -> None:
        micro = self._example(batch)
        self._arrived.clear()
        self._flat.grad.zero_()
        if self._memory is None:
            self._pass(micro)
        else:
            with SavedTensors() as kept:
                self._pass(micro, lambda: self._require(kept))
        self._optimizer.step(Recorder(None))

    def _pass(self, micro: Micro, forward_done: Callable[[], None] = lambda: None) -> None:
        left = self._stage({name: micro.inputs[name] for name in self._stage.inputs})
        loss = self._task.loss(left, micro, TensorGroup())
        forward_done()
        backward({"loss": loss * 1e-3}, {})
