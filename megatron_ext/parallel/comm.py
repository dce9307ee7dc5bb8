"""Messages between ranks: stage to stage, and the all-reduces. A lost rank is told by name.

gloo sends are rendezvous (the receiver must have posted its receive), so receives are posted before they
are needed and sends are waited for late.

What comes from a rank in one group comes in the order in which it was sent: nothing else tells messages apart, for nccl
has no tags. So each direction of each kind of message has a group of its own (`Groups` of
`megatron_ext.parallel.groups`); a receive that nccl has posted ahead then holds up no send either.

With nccl a message is a kernel, in a stream of its two ranks and their group, and `wait` makes only the GPU wait, not
the host. Streams are not independent: CUDA has 8 hardware queues for all of a process, or as many as
CUDA_DEVICE_MAX_CONNECTIONS says, and what cannot begin yet holds up all that was launched after it in its queue.
"""

from __future__ import annotations

import json
import resource
from collections import deque
from datetime import timedelta
from typing import Any, Callable, ContextManager, Deque, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.contract.errors import PeerLost, address_space_left, reason_of, shortage
from megatron_ext.timeline.progress import Wait

GROUP_THREADS = 4
"""Threads of a group with gloo: two that do its work, the loop of its device, and one for what else starts
meanwhile."""
THREAD_ROOM = 2**20
"""Bytes beside the stacks."""


class _AnnotateErrors(Wait):
    """A class, for it is entered at every message, and takes a third of what `contextmanager` does."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and not shortage(error):
            raise PeerLost(f"{self.what} failed: {reason_of(error)}") from error


def annotate_errors(what: str) -> ContextManager[None]:
    """Turns a failure of the communication library into `PeerLost`, which says what was under way.

    Not where memory ran out, of which NCCL takes some for every group, or threads: that is no other rank's doing.
    Meanwhile this rank waits for others, as far as `megatron_ext.timeline.progress` knows.
    """
    return _AnnotateErrors(what)


def meet(store: Store, rank: int, ranks: int, device: torch.device, timeout: timedelta) -> None:
    """Joins all `ranks` at `store`; this, and any message from then on, waits for another rank until `timeout`.

    Not with a `device_id`, with which nccl would run all messages of a group, sent and received, one after another
    in one stream. Without one each two ranks of a group have their own.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    store.set_timeout(timeout)  # nccl's communicators meet here, too, and wait as long as the store says
    with annotate_errors("meeting the other ranks"):
        options = _options(timeout) if backend == "nccl" and dist.is_nccl_available() else None
        if options is None:
            require_room_for_threads()
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout, pg_options=options)


def require_room_for_threads() -> None:
    """Raises MemoryError where `ulimit -v` leaves less than the stacks of a group's threads take.

    gloo would get some of them and wait for ever to end these (seen with torch 2.13: its destructor waits for a thread
    that waits for work).
    """
    left = address_space_left()
    if left is not None and left < (needed := GROUP_THREADS * _stack_bytes() + THREAD_ROOM):
        raise MemoryError(
            f"{left // 2**20} MiB of address space are left, but the threads of a group of ranks take "
            f"{needed // 2**20} MiB"
        )


def _stack_bytes() -> int:
    """What a thread's stack takes: the soft limit of stacks, or what the C library takes without one."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return 2**23 if limit == resource.RLIM_INFINITY else limit


def new_group(ranks: Sequence[int], timeout: Optional[timedelta] = None) -> dist.ProcessGroup:
    """A group of some of the ranks that met; all of them call it."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return dist.new_group(list(ranks), timeout=timeout, pg_options=_options(timeout))
    require_room_for_threads()
    return dist.new_group(list(ranks), timeout=timeout)


def _options(timeout: Optional[timedelta]) -> Any:
    """Returns the options of one group with nccl: its kernels begin before those of a computation that are queued
    already, so that the rank which waits for a message does not wait for them as well."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options


class Peer(NamedTuple):
    """The other end of a channel."""

    rank: int
    group: Optional[dist.ProcessGroup]
    """In which these two ranks send nothing else, and nothing the other way."""


AHEAD_BYTES = 16 * 2**20
"""What a channel's receives posted ahead may take with gloo; one is always posted."""


class Inbox:
    """Receives announced tensors from one rank.

    With gloo as many receives are posted ahead as `AHEAD_BYTES` allows: posting one sends a word to the sender, whose
    communication thread spins if that comes while it sends. Posted long before, small messages need no word when they
    are sent.

    With nccl at most one is, and only after the first message. A second one could not begin before the first one has
    ended, and would hold up the computation behind it in its hardware queue, for ever if the sender waits for that.
    """

    def __init__(self, peer: Peer, what: str, one_ahead: bool) -> None:
        """`one_ahead` is whether nccl may post one receive ahead."""
        self.peer = peer
        self._what = f"{what} from rank {peer.rank}"
        self._one_ahead = one_ahead
        self._ahead = 1
        self._expected: Deque[Tensor] = deque()
        self._posted: Deque[Tuple[Tensor, dist.Work]] = deque()

    def expect(self, likes: Sequence[Tensor]) -> None:
        """Announces the next tensors and, with gloo, posts the first receives.

        `likes` have the shapes, number formats and device of what comes.
        """
        if not likes:
            return
        self._expected.extend(likes)
        if likes[0].is_cuda:
            self._ahead = int(self._one_ahead)
        else:
            self._ahead = max(1, AHEAD_BYTES // max(1, *(like.nbytes for like in likes)))
            self._post(self._ahead)

    def take(self) -> Tensor:
        """Waits for the next tensor; if more are announced, those ahead are posted before this returns."""
        self._post(1)
        assert self._posted, "take() without a tensor announced by expect()"
        tensor, work = self._posted.popleft()
        with annotate_errors(self._what):
            work.wait()
        self._post(self._ahead)
        return tensor

    def _post(self, ahead: int) -> None:
        while self._expected and len(self._posted) < ahead:
            tensor = torch.empty_like(self._expected.popleft())
            with annotate_errors(self._what):
                work = dist.irecv(tensor, self.peer.rank, self.peer.group)
            assert work is not None
            self._posted.append((tensor, work))


class Outbox:
    """Sends to one rank without waiting; keeps a tensor until it was sent."""

    def __init__(self, peer: Peer, what: str) -> None:
        self.peer = peer
        self._what = f"{what} to rank {peer.rank}"
        self._pending: Deque[Tuple[Tensor, dist.Work]] = deque()

    def put(self, tensor: Tensor) -> None:
        """Starts sending. Lets go of what was sent meanwhile, which gloo tells only when waited for, in `flush`."""
        while self._pending and self._pending[0][1].is_completed():
            self._finish()
        tensor = tensor.contiguous()
        with annotate_errors(self._what):
            work = dist.isend(tensor, self.peer.rank, self.peer.group)
        assert work is not None
        self._pending.append((tensor, work))

    def flush(self) -> None:
        """Waits until all was received."""
        while self._pending:
            self._finish()

    def _finish(self) -> None:
        _, work = self._pending.popleft()
        with annotate_errors(self._what):
            work.wait()


def all_reduce(tensor: Tensor, group: Optional[dist.ProcessGroup], what: str) -> None:
    """Sums `tensor` over a group, in place; a rank without a group is alone."""
    if group is not None:
        with annotate_errors(what):
            dist.all_reduce(tensor, group=group)


def all_gather(own: Tensor, whole: Tensor, group: Optional[dist.ProcessGroup], what: str) -> None:
    """Lays the tensors of a group's ranks out in `whole` [ranks, …]; `own` […] may be this rank's part of it."""
    with annotate_errors(what):
        if own.is_cuda:  # given a list, nccl's ranks copy all of it once more
            dist.all_gather_into_tensor(whole, own, group=group)
        else:  # gloo knows lists alone in torch 2.0
            dist.all_gather(list(whole), own, group=group)


def begin_all_gather(own: Tensor, whole: Tensor, group: Optional[dist.ProcessGroup]) -> Optional[dist.Work]:
    """Begins what `all_gather` does."""
    if own.is_cuda:
        work: Optional[dist.Work] = dist.all_gather_into_tensor(whole, own, group=group, async_op=True)
    else:
        work = dist.all_gather(list(whole), own, group=group, async_op=True)
    return work


class Works:
    """Messages of one group that go on together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Until all have ended; with NCCL only the GPU waits."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Return that of the last one; NCCL runs those of a group one after another."""
        return self._works[-1].get_future()


def begin_hand_out(whole: Tensor, sizes: Sequence[int], group: Optional[dist.ProcessGroup]) -> Works:
    """Begins what `all_gather` does with parts of unlike lengths: `sizes`, in the order of the ranks. Each rank has its
    own part of `whole` in its place there."""
    return _begin_by_part(dist.broadcast, whole, sizes, group)


def begin_reduce(whole: Tensor, sizes: Sequence[int], group: Optional[dist.ProcessGroup]) -> Works:
    """Begins to sum `whole` over a group, such that each rank then has the sum of its own part there, of which `sizes`
    are the lengths; what is left of the others has no meaning."""
    return _begin_by_part(dist.reduce, whole, sizes, group)


def _begin_by_part(
    operation: Callable[..., Any], whole: Tensor, sizes: Sequence[int], group: Optional[dist.ProcessGroup]
) -> Works:
    """One for each rank's part, from or to that rank."""
    assert group is not None, "parts belong to the ranks of a group"
    parts = enumerate(whole.split_with_sizes(list(sizes)))
    return Works(
        [operation(part, dist.get_global_rank(group, rank), group=group, async_op=True) for rank, part in parts]
    )


def exchange(own: object, ranks: int, device: torch.device, what: str) -> List[Any]:
    """Returns what each rank gives, as JSON has it; called by all ranks of the run."""
    content = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([len(content)], device=device)
    with annotate_errors(what):
        dist.all_reduce(size, dist.ReduceOp.MAX)
    padded = torch.full((int(size.item()),), ord(" "), dtype=torch.uint8, device=device)
    padded[: len(content)] = content
    whole = padded.new_empty(ranks, len(padded))
    all_gather(padded, whole, None, what)
    return [json.loads(bytes(row)) for row in whole.tolist()]


class Barrier:
    """Makes ranks wait for all others while some of them make their weights, or read or write files, which may take
    longer than any message.

    It goes through the store where they met. A rank that dies meanwhile is not missed here: its node ends the others.
    """

    PATIENCE = timedelta(hours=2)

    def __init__(self, store: Store, ranks: int) -> None:
        self._store = store
        self._ranks = ranks

    def wait(self, name: str, what: str) -> None:
        """Returns when all ranks have come to the gate called `name`, which they pass once."""
        self.all_succeeded(name, what)

    def all_succeeded(self, name: str, what: str, failed: bool = False) -> bool:
        """Waits as `wait` does. Returns whether no rank came with `failed`, the same on all ranks."""
        failures = f"gate/{name}/failures"
        with annotate_errors(what):
            if failed:
                self._store.add(failures, 1)
            if self._store.add(f"gate/{name}", 1) == self._ranks:
                self._store.set(f"gate/{name}/open", str(self._store.add(failures, 0)))
            self._store.wait([f"gate/{name}/open"], self.PATIENCE)
            return int(self._store.get(f"gate/{name}/open")) == 0


def mark() -> torch.cuda.Event:
    """Return an event that passes when the current stream has done what it has so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
