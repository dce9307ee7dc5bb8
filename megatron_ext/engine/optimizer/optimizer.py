"""The optimizer of a rank: gradient clipping over all ranks, the update, and weights that replicas share."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import AbstractSet, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.contract.run_files import EMA, ISLAND, WEIGHTS
from megatron_ext.contract.train_config import TrainConfig
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.optimizer import update_rules
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from megatron_ext.engine.optimizer.offload import OffloadedRule
from megatron_ext.engine.optimizer.outer import OuterOptimizer
from megatron_ext.engine.optimizer.precision import LogMaxScaler, scaler_of
from megatron_ext.parallel.comm import all_gather, all_reduce, annotate_errors, begin_hand_out
from megatron_ext.parallel.groups import ByNode
from megatron_ext.timeline.progress import Wait
from megatron_ext.timeline.recorder import Recorder
from megatron_ext.timeline.usage import Traffic

_GATHERING = "all-gather of the sharded optimizer"


class DataGroup(NamedTuple):
    """A rank's data-parallel group: its size, and this rank's number in it."""

    size: int
    rank: int
    group: Optional[dist.ProcessGroup]
    by_node: Optional[ByNode] = None
    """Its parts, where what it shares is handed out across nodes first."""


ALONE = DataGroup(1, 0, None)


class Optimizer:
    """Steps the flat weights of one rank; all ranks call it together.

    With a sharded optimizer a replica has the gradients of its share (`FlatWeights.share`), and keeps fp32 weights and
    the optimizer's state of it only; the replicas hand each other their updated weights (Rajbhandari et al. 2020,
    stage 1).
    """

    def __init__(
        self,
        flat: FlatWeights,
        train: TrainConfig,
        model: Optional[dist.ProcessGroup] = None,
        data: DataGroup = ALONE,
        sharded: bool = False,
        counted_elsewhere: Sequence[slice] = (),
        tensor: Optional[dist.ProcessGroup] = None,
        cut: AbstractSet[str] = frozenset(),
        copies: int = 1,
        cuts: Sequence[int] = (),
        offloads: bool = False,
    ) -> None:
        """`model` is a group of ranks in which each gradient of a weight is held by as many as the holder says: its
        `copies`. `counted_elsewhere` are parts of the flat weights of which another rank of that
        group has a copy, and counts it in the norm. `cut` names the parameters that the `tensor` group shares. `cuts`
        are ends of buckets, up to which `step_early` is to update the weights; nothing may clip or change their
        gradients. If it `offloads`, what it keeps lies in the host's memory.
        """
        self._copies = copies
        # At ends of the norm's rows, so that the norm is the same to the last bit.
        self._cuts = sorted({cut // update_rules.NORM_ROW * update_rules.NORM_ROW for cut in cuts} - {0})
        self._stepped = 0
        """How many weights this iteration has updated already."""
        self._norms_of_stepped: List[Tensor] = []
        """Norms of the rows of their gradients."""
        self._flat = flat
        self._train = train
        self._model = model
        self._data = data if sharded else ALONE
        self._share = flat.share
        self._counted_elsewhere = [flat.share.within(part) for part in counted_elsewhere]
        self._is_weight = flat.weight.dtype == torch.float32 and (not sharded or flat.whole is not None)
        """Whether the optimizer steps the model's weights themselves, not a copy in fp32."""
        self._gradient = flat.grad[: self._share.length]
        pieces = [
            update_rules.Piece(self._share.within(here), flat.parameters[name].dim() > 1, name in cut)
            for name, here in flat.slices.items()
        ]
        self._master: Optional[nn.Parameter] = None
        """The weights that it steps, fp32, unless it offloads them."""
        self._average: Optional[Tensor] = None
        """The exponential average of the weights (`train.ema`), from the initial ones on, unless it offloads it."""
        self._offloaded: Optional[OffloadedRule] = None
        if offloads:
            at_once = update_rules.updates_at_once(flat.weight.device, train)
            places = flat.weight, flat.kept, self._is_weight, self._gradient
            self._offloaded = OffloadedRule(*places, pieces, train, self._cuts, at_once)
            self._rule: update_rules.UpdateRule = self._offloaded
            self._offloaded.begin(self._share.of(flat.initial))
        else:
            self._master = nn.Parameter(
                flat.weight if self._is_weight else self._share.of(flat.initial).to(flat.weight.device, copy=True)
            )
            self._master.grad = self._gradient
            self._rule = update_rules.update_rule(self._master, pieces, train, self._data.group, tensor, self._cuts)
            self._average = None if train.ema is None else self._master.data.clone()
        flat.initial = torch.empty(0)
        self._outer: Optional[OuterOptimizer] = None
        """What islands have in common; `_master` then has the weights of this rank's own."""
        if train.sync_every is not None:
            assert self._master is not None, "islands offload nothing"
            self._outer = OuterOptimizer(self._master.data, train)
        self.kinds = (WEIGHTS, *self._rule.kinds, *((EMA,) if train.ema is not None else ()))
        if self._outer is not None:
            self.kinds += (ISLAND, *self._outer.kinds)
        """Kinds of the state, by the names that checkpoints have for them."""
        self.scaler = scaler_of(train)
        self.updates = 0
        """Updates made so far; skipped iterations make none."""

    def step_early(self, recorder: Recorder, stop: int, lr: float) -> None:
        """Updates weights before `stop` of the flat ones, whose gradients are summed, so that `step` need not."""
        ready = [cut for cut in self._cuts if self._stepped < cut <= stop]
        if not ready:
            return
        here = slice(self._stepped, ready[-1])
        with recorder.span("optimizer"):
            self._norms_of_stepped.append(update_rules.row_norms(self._gradient[here]))
            self._update(recorder, lr, here)
            self._follow(here)
        self._stepped = here.stop

    def step(
        self, recorder: Recorder, lr: Optional[float] = None, is_own_fault: Callable[[], bool] = lambda: True
    ) -> float:
        """Clips, updates and zeroes the gradients, which carry the loss scale.

        `lr` is the learning rate; None: what the policy has after so many updates. Of weights that `step_early` has
        updated in this iteration it updates none again. Returns the norm of the whole
        model's gradient before clipping. If it is not finite nothing is updated; the loss scale then gets smaller, if
        `is_own_fault`.
        """
        scale, rest = self.scaler.scale, slice(self._stepped, len(self._gradient))
        lr = learning_rate(self.updates, self._train) if lr is None else lr
        with recorder.span("optimizer"):
            with recorder.span("optimizer-clip-main-grad"):
                measured = self._measured(recorder)
                reading = Reading(measured)
                if not self._rule.unscales:
                    norm, largest = (value / scale for value in reading.values())
                    clip = self._train.clip_grad
                    factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
                    if factor != scale and math.isfinite(norm):
                        self._gradient.mul_(factor / scale)
            if self._rule.unscales:  # a GPU has begun its update when the host knows whether there is one
                self._update(recorder, lr, rest, self._unscaled(measured[0], scale))
                norm, largest = (value / scale for value in reading.values())
            elif math.isfinite(norm):
                self._update(recorder, lr, rest)
            if math.isfinite(norm):
                self._follow(rest)
                self.updates += 1
            if math.isfinite(norm) or is_own_fault():
                self.scaler.update(math.isfinite(norm), largest)
            self._flat.grad.zero_()
            self._stepped = 0
            self._norms_of_stepped.clear()
        return norm

    def state(self, kinds: Optional[Sequence[str]] = None) -> Dict[str, Tensor]:
        """Return by kind, of all or some kinds, what there is of all parameters of the rank, in fp32, laid out as the
        flat weights.

        All replicas call it together.
        """
        own = self._rule.state()
        if self._master is not None:
            own[WEIGHTS] = self._master.data
        elif self._is_weight:
            own[WEIGHTS] = self._flat.weight
        if self._average is not None:
            own[EMA] = self._average
        if self._outer is not None and self._master is not None:
            own.update(self._outer.state(), **{ISLAND: self._master.data})
        own = {kind: own[kind] for kind in (self.kinds if kinds is None else kinds)}
        if self._data.size == 1:
            return own
        return {kind: self._gathered(share) for kind, share in own.items()}

    def _gathered(self, share: Tensor) -> Tensor:
        """Return on the host what all replicas keep; it passes through the device bucket by bucket, for that may have
        no room for more."""
        whole = torch.empty(self._flat.numel)
        for number, (bucket, (_, kept)) in enumerate(zip(self._share.buckets, self._share.parts)):
            passing = torch.empty(bucket.stop - bucket.start, device=self._flat.weight.device)
            own = passing[self._share.within_bucket(number)]
            own.copy_(share[kept])
            self._gather_bucket(number, own, passing)
            whole[bucket].copy_(passing)
        return whole

    def move(self, weight: Tensor) -> None:
        """Goes on with the weights in another buffer, which takes their values; the one before stays as it is."""
        weight.copy_(self._flat.weight)
        self._flat.weight = weight
        if self._is_weight:
            self._rule.move(weight)

    def load(self, state: Dict[str, Tensor], updates: int) -> None:
        """Takes over what `state` gave, in this or another layout."""
        self._rule.load({kind: self._share.of(state[kind]) for kind in self.kinds}, updates)
        if self._master is not None:
            self._master.data.copy_(self._share.of(state[WEIGHTS if self._outer is None else ISLAND]))
        if self._outer is not None:
            self._outer.load(state)
        if self._average is not None:
            self._average.copy_(self._share.of(state[EMA]))
        self.updates = updates
        self._hand_out(Recorder(None), slice(0, len(self._gradient)))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While it lasts the model has the average of the weights, or those that islands have in common, where there
        are any; all replicas enter it."""
        average = self._average if self._outer is None else self._outer.weights
        if self._offloaded is not None and self._train.ema is not None:
            average = self._offloaded.average()
        if average is None:
            yield
            return
        kept = self._flat.weight.clone()
        try:
            self._flat.kept.put(average, self._flat.weight)
            self._gather()
            yield
        finally:
            self._flat.weight.copy_(kept)
            if self._flat.whole is not None:
                self._gather()

    def step_outer(self, recorder: Recorder, part: float, average: Callable[[Tensor], None]) -> None:
        """Goes on with the weights after a step of the outer optimizer, after `step`; all islands call it together.

        `average` sums over the islands, of which this one counts as `part`.
        """
        assert self._outer is not None and self._master is not None
        mean = self._flat.grad  # zeros, and nobody's until the next pass
        torch.mul(self._master.data, part, out=mean)
        average(mean)
        with recorder.span("optimizer"):
            self._outer.step(mean)
            mean.zero_()
            self._master.data.copy_(self._outer.weights)
            self._hand_out(recorder, slice(0, len(self._master)))

    def _update(
        self, recorder: Recorder, lr: float, here: slice, unscaled: Optional[update_rules.Unscaled] = None
    ) -> None:
        if len(self._gradient):
            self._rule.step(lr, self.updates, here, unscaled)
        self._hand_out(recorder, here)

    def _follow(self, here: slice) -> None:
        """Has the average of the weights follow their update."""
        if self._average is not None:
            assert self._train.ema is not None and self._master is not None
            self._average[here].lerp_(self._master.data[here], 1.0 - self._train.ema)

    def _unscaled(self, norm: Tensor, scale: float) -> update_rules.Unscaled:
        """What `step` does on a CPU to gradients of this norm (fp64, with the loss scale) before their update."""
        clip = self._train.clip_grad
        divisor: Optional[Tensor] = None
        if clip:
            divisor = ((norm / scale + 1e-6) / clip).clamp_(min=1.0).mul_(scale).float()
        elif scale != 1.0:
            divisor = torch.full((), scale, device=norm.device)
        return update_rules.Unscaled(divisor, norm.isfinite().logical_not_().float())

    def _hand_out(self, recorder: Recorder, here: slice) -> None:
        """Gives the model the updated weights: those `here` of this rank's own, and from the others theirs."""
        if not self._is_weight and self._master is not None:  # an offloaded rule has given its own already
            self._flat.kept.put(self._master.data, self._flat.weight, here)
        if self._data.size > 1:
            with recorder.span("params-all-gather"):
                self._gather(recorder.traffic)

    def _gather(self, traffic: Optional[Traffic] = None) -> None:
        """Gives all replicas each other's shares of the weights, bucket by bucket; where passes gather them, of those
        alone that are always there."""
        whole, flat = self._flat.whole, self._flat.weight
        if self._data.size == 1:
            return
        if whole is None:
            for number, (bucket, (here, _)) in enumerate(zip(self._share.buckets, self._share.parts)):
                self._gather_bucket(number, flat[here], flat[bucket], traffic)
        elif whole.late is not None:
            self._gather_bucket(whole.late, flat[self._share.parts[whole.late][1]], whole.of(whole.late), traffic)

    def _gather_bucket(self, number: int, own: Tensor, whole: Tensor, traffic: Optional[Traffic] = None) -> None:
        """Gives all replicas each other's parts of a bucket, of which `whole` then has all; `own` may lie there."""
        by_node, sizes = self._data.by_node, self._share.sizes(number)
        if sizes is not None:
            place = whole[self._share.within_bucket(number)]
            if place.data_ptr() != own.data_ptr():
                place.copy_(own)
            with annotate_errors(_GATHERING):
                begin_hand_out(whole, sizes, self._data.group).wait()
            if traffic is not None:
                traffic.shared_out(whole, self._data.group)
            return
        if by_node is not None:  # each node's replicas then have a part of the bucket, one after another
            across, within = dist.get_world_size(by_node.across), dist.get_rank(by_node.within)
            part = whole[within * across * len(own) :][: across * len(own)]
            self._gather_over(by_node.across, own, part, traffic)
            own = part
        self._gather_over(self._data.group if by_node is None else by_node.within, own, whole, traffic)

    @staticmethod
    def _gather_over(
        group: Optional[dist.ProcessGroup], own: Tensor, whole: Tensor, traffic: Optional[Traffic]
    ) -> None:
        all_gather(own, whole.view(-1, len(own)), group, _GATHERING)
        if traffic is not None:
            traffic.all_gathered(own, group)

    def _measured(self, recorder: Recorder) -> Tensor:
        """Measure the whole model's gradient, with the loss scale: its norm, and how far from 0 any of it lies where
        the loss scale follows that, else NaN; fp64. Each weight counts once."""
        square = update_rules.square_norm(self._gradient[self._stepped :], self._norms_of_stepped)
        elsewhere = [self._gradient[part] for part in self._counted_elsewhere if part.start < part.stop]
        if elsewhere:
            others = update_rules.square_norms(elsewhere)
            for one in others.sum(0, keepdim=True) if others.is_cuda else others:
                square -= one
        square /= self._copies
        if self._model is not None:
            with recorder.span("grad-norm-all-reduce"):
                all_reduce(square, self._model, "all-reduce of the gradient norm")
        norm = square.clamp(min=0.0).sqrt()
        largest = self._largest().double() if isinstance(self.scaler, LogMaxScaler) else torch.full_like(norm, math.nan)
        return torch.stack([norm, largest])

    def _largest(self) -> Tensor:
        """How far from 0 any gradient of the whole model lies; 0 of none."""
        found = torch.linalg.vector_norm(self._gradient, math.inf) if len(self._gradient) else torch.zeros(())
        found = found.to(self._flat.grad.device)
        if self._model is not None:
            with annotate_errors("all-reduce of the largest gradient"):
                dist.all_reduce(found, dist.ReduceOp.MAX, self._model)
        return found


class Reading:
    """The values of a tensor [n], for which the host waits only when it asks: not for what the GPU got meanwhile."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Optional[torch.cuda.Event] = None
        self._tensor = tensor
        if tensor.is_cuda:
            self._tensor = torch.empty_like(tensor, device="cpu").pin_memory().copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def values(self) -> List[float]:
        with Wait("reading the gradient norm"):
            if self._event is not None:
                self._event.synchronize()
            return self._tensor.tolist()
