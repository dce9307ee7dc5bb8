"""How weights follow their gradients: Adam, SGD with momentum and LAMB, each on a rank's share of the flat weights.

The formulas and their sources are in docs/training.md. Biases and norms do not decay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from inspect import signature
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron_ext.contract.train_config import ADAMW, KINDS, LAMB, SGD, TrainConfig
from megatron_ext.parallel.comm import all_reduce

NORM_ROW = 1024
"""Squares that are summed in fp32: few enough for an error far below that of the gradients themselves."""
MOST = 2**30
"""Numbers of a tensor that torch's kernels step on a GPU."""
SGD_IS_FUSED = "fused" in signature(sgd).parameters
"""Since torch 2.3."""


def recounted(train: TrainConfig, updates: int, instead: int) -> Dict[str, float]:
    """Return by kind the factor of moments that had so many updates, for the same means where they count as others."""
    if updates == instead or train.optimizer == SGD:
        return {}
    betas = (train.adam_beta1, train.adam_beta2)
    return {kind: (1.0 - beta**instead) / (1.0 - beta**updates) for kind, beta in zip(KINDS[train.optimizer], betas)}


class Piece(NamedTuple):
    """What a rank steps of one parameter."""

    here: slice
    """In its share of the flat weights; empty where other replicas step all of it."""
    decays: bool
    cut: bool
    """Whether a tensor group shares it."""


class Unscaled(NamedTuple):
    """What a GPU makes of gradients while it steps by them, so that the host need not know it first."""

    divisor: Optional[Tensor]
    """fp32, of all gradients; None: they are as they should be."""
    overflow: Tensor
    """fp32, 1 where the gradient is not finite and nothing is to be updated, else 0."""


class UpdateRule(ABC):
    """Steps `master` [n], fp32, by its gradient."""

    unscales = False
    """Whether `step` takes `Unscaled`."""

    def __init__(self, master: nn.Parameter, pieces: Sequence[Piece], train: TrainConfig) -> None:
        self.kinds = KINDS[train.optimizer]
        self._master = master
        self._train = train
        self._decaying = [piece.here for piece in pieces if piece.decays and piece.here.start < piece.here.stop]

    @abstractmethod
    def step(self, lr: float, updates: int, here: slice, unscaled: Optional[Unscaled] = None) -> None:
        """One update, after so many before it, of the weights `here`, which are all or whole parts of them."""

    @abstractmethod
    def state(self) -> Dict[str, Tensor]:
        """Return the state by kind, [n]; zeros before the first update."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Takes over copies of what `state` gave."""

    def move(self, weight: Tensor) -> None:
        """Goes on with the master weights in another buffer, which has their values."""
        self._master.data = weight


def kept_kinds(train: TrainConfig) -> Tuple[str, ...]:
    """Return the kinds of state that an update needs: none of SGD without momentum."""
    return KINDS[train.optimizer] if train.optimizer != SGD or train.momentum else ()


class TorchRule(UpdateRule):
    """An optimizer of torch's, whose state is one flat tensor for each kind.

    On a GPU it steps the runs of weights that decay alike, and torch decays them and divides their gradients in its one
    pass. Elsewhere it gets parts that are stepped one by one, and no weight decay.

    The functions below torch's optimizers do the work: `torch.optim.Optimizer` imports torch's compiler, 1.5 CPU
    seconds at every start of a run.
    """

    def __init__(
        self,
        master: nn.Parameter,
        pieces: Sequence[Piece],
        train: TrainConfig,
        cuts: Sequence[int],
        at_once: bool,
        state: Optional[Dict[str, Tensor]] = None,
    ) -> None:
        """`cuts` are where parts begin that are stepped one by one; `at_once` says whether torch does all. With
        `state`, the state by kind is to lie there."""
        super().__init__(master, pieces, train)
        self.unscales = at_once
        parts = _runs(pieces, cuts) if at_once else []
        if not parts:
            ends = [*cuts, len(master)]
            parts = [(slice(start, stop), False) for start, stop in zip([0, *cuts], ends)]
        if state is None:
            state = {kind: torch.zeros_like(master.data) for kind in kept_kinds(train)}
        self._state = state
        self._steps = torch.zeros(len(parts), device=master.device)
        """For each part, how often torch has stepped it."""
        self._groups = [
            (
                train.weight_decay if wanted else 0.0,
                [
                    (here, [values[here] for values in self._state.values()], steps)
                    for (here, decays), steps in zip(parts, self._steps)
                    if decays is wanted
                ],
            )
            for wanted in (True, False)
        ]
        """For each weight decay the parts that have it: where, their moments, and how often they were stepped."""

    @torch.no_grad()
    def step(self, lr: float, updates: int, here: slice, unscaled: Optional[Unscaled] = None) -> None:
        gradient = self._master.grad
        assert gradient is not None
        if not self.unscales:
            self._decay(lr, gradient, here)
        for decay, parts in self._groups:
            inside = [each for each in parts if here.start <= each[0].start and each[0].stop <= here.stop]
            if inside:
                weights = [self._master.data[part] for part, _, _ in inside]
                gradients = [gradient[part] for part, _, _ in inside]
                self._step(weights, gradients, [(moments, steps) for _, moments, steps in inside], lr, decay, unscaled)

    def _step(
        self,
        weights: List[Tensor],
        gradients: List[Tensor],
        kept: Sequence[Tuple[List[Tensor], Tensor]],
        lr: float,
        decay: float,
        unscaled: Optional[Unscaled],
    ) -> None:
        """Steps parts of the weights that decay alike; `kept` are their moments and how often they were stepped."""
        train = self._train
        options: Dict[str, Any] = {"lr": lr, "weight_decay": decay, "maximize": False}
        if unscaled is not None:
            options.update(grad_scale=unscaled.divisor, found_inf=unscaled.overflow)
        if train.optimizer == SGD:
            momenta = [moments[0] if moments else None for moments, _ in kept]
            options.update(momentum=train.momentum, dampening=0.0, nesterov=train.nesterov, has_sparse_grad=False)
            if self.unscales:
                options["fused"] = True
            sgd(weights, gradients, momenta, **options)
            return
        options.update(beta1=train.adam_beta1, beta2=train.adam_beta2, eps=train.adam_eps, amsgrad=False)
        options["fused"] = self.unscales or torch.__version__ >= "2.4"  # before, it knew no CPU
        means, squares, steps = ([m[0] for m, _ in kept], [m[1] for m, _ in kept], [steps for _, steps in kept])
        rule = adamw if self.unscales and train.optimizer == ADAMW else adam
        rule(weights, gradients, means, squares, [], steps, **options)

    def state(self) -> Dict[str, Tensor]:
        return {kind: self._state[kind] if self._state else torch.zeros_like(self._master.data) for kind in self.kinds}

    def load(self, state: Mapping[str, Tensor], updates: int) -> None:
        for kind, own in self._state.items():
            own.copy_(state[kind])
        self.counts(updates)

    def counts(self, updates: int) -> None:
        """Goes on as after so many updates."""
        self._steps.fill_(updates)

    def _decay(self, lr: float, gradient: Tensor, here: slice) -> None:
        decay = self._train.weight_decay
        both = [slice(max(piece.start, here.start), min(piece.stop, here.stop)) for piece in self._decaying]
        inside = [one for one in both if one.start < one.stop]
        if not inside or not decay:
            return
        weights = [self._master.data[one] for one in inside]
        if self._train.optimizer == ADAMW:
            torch._foreach_mul_(weights, 1.0 - lr * decay)
        else:
            torch._foreach_add_([gradient[one] for one in inside], weights, alpha=decay)


def _runs(pieces: Sequence[Piece], cuts: Sequence[int]) -> List[Tuple[slice, bool]]:
    """Neighbouring pieces that decay alike, in one; none reaches over a cut, or is too long for torch's kernels.

    In torch 2.0 these count the numbers of a tensor in 32 bits, and update what is beyond with wrong values.
    """
    found: List[Tuple[slice, bool]] = []
    for piece in pieces:
        start, stop = piece.here.start, piece.here.stop
        while start < stop:
            end = min([cut for cut in cuts if cut > start] + [stop, start + MOST])
            last, decays = found[-1] if found else (slice(-1, -1), False)
            if (last.stop, decays) == (start, piece.decays) and start not in cuts and end - last.start <= MOST:
                found[-1] = (slice(last.start, end), decays)
            else:
                found.append((slice(start, end), piece.decays))
            start = end
    return found


class Lamb(UpdateRule):
    """LAMB (You et al. 2020, algorithm 2): the update of a weight matrix has the norm lr * |matrix|.

    What does not decay takes Adam's update, as in the authors' code. The norms are those of whole parameters: summed
    over the replicas that share the optimizer, and over the tensor group where it shares the parameter.
    """

    def __init__(
        self,
        master: nn.Parameter,
        pieces: Sequence[Piece],
        train: TrainConfig,
        replicas: Optional[dist.ProcessGroup],
        tensor: Optional[dist.ProcessGroup],
    ) -> None:
        """`replicas` are those that share the optimizer."""
        super().__init__(master, pieces, train)
        self._scaled = [piece for piece in pieces if piece.decays]
        self._cut = [number for number, piece in enumerate(self._scaled) if piece.cut]
        self._replicas = replicas
        self._tensor = tensor
        self._m, self._v = torch.zeros_like(master.data), torch.zeros_like(master.data)

    def step(self, lr: float, updates: int, here: slice, unscaled: Optional[Unscaled] = None) -> None:
        train, weights, gradient = self._train, self._master.data, self._master.grad
        assert gradient is not None
        assert here == slice(0, len(weights)), "the norms are those of whole matrices"
        self._m.mul_(train.adam_beta1).add_(gradient, alpha=1.0 - train.adam_beta1)
        self._v.mul_(train.adam_beta2).addcmul_(gradient, gradient, value=1.0 - train.adam_beta2)
        denominator = (self._v / (1.0 - train.adam_beta2 ** (updates + 1))).sqrt_().add_(train.adam_eps)
        update = (self._m / (1.0 - train.adam_beta1 ** (updates + 1))).div_(denominator)
        if self._decaying:
            parts = [update[piece] for piece in self._decaying]
            torch._foreach_add_(parts, [weights[piece] for piece in self._decaying], alpha=train.weight_decay)
        for scaled, ratio in zip(self._scaled, self._ratios(update)):
            update[scaled.here].mul_(ratio)
        weights.add_(update, alpha=-lr)

    def state(self) -> Dict[str, Tensor]:
        return dict(zip(self.kinds, (self._m, self._v)))

    def load(self, state: Mapping[str, Tensor], updates: int) -> None:
        for kind, own in zip(self.kinds, (self._m, self._v)):
            own.copy_(state[kind])

    def _ratios(self, update: Tensor) -> List[Tensor]:
        """Norm of each scaled parameter by that of its update; 1 where one of them is 0."""
        if not self._scaled:
            return []
        here = [piece.here for piece in self._scaled]
        squares = torch.stack([square_norms([of[one] for one in here]) for of in (self._master.data, update)])
        all_reduce(squares, self._replicas, "all-reduce of LAMB's norms")
        if self._cut and self._tensor is not None:
            shared = squares[:, self._cut].contiguous()
            all_reduce(shared, self._tensor, "all-reduce of LAMB's norms")
            squares[:, self._cut] = shared
        weights, updates = squares.sqrt()
        ratios = torch.where((weights > 0) & (updates > 0), weights / updates, torch.ones_like(weights))
        return list(ratios.float())


def update_rule(
    master: nn.Parameter,
    pieces: Sequence[Piece],
    train: TrainConfig,
    replicas: Optional[dist.ProcessGroup] = None,
    tensor: Optional[dist.ProcessGroup] = None,
    cuts: Sequence[int] = (),
) -> UpdateRule:
    """The rule of `train.optimizer`; the groups are as `Lamb` takes them, and `cuts` are where parts begin that are
    stepped one by one.
    """
    if train.optimizer == LAMB:
        return Lamb(master, pieces, train, replicas, tensor)
    return TorchRule(master, pieces, train, cuts, updates_at_once(master.device, train))


def updates_at_once(device: torch.device, train: TrainConfig) -> bool:
    """Whether torch decays weights and divides gradients in the pass that updates. On a CPU it could, too, to other
    last bits than runs have had there."""
    return device.type == "cuda" and (train.optimizer != SGD or SGD_IS_FUSED)


def row_norms(flat: Tensor) -> Tensor:
    """Return the norms of as many whole rows as there are."""
    whole = len(flat) // NORM_ROW * NORM_ROW
    return torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)


def square_norm(flat: Tensor, before: Sequence[Tensor] = ()) -> Tensor:
    """The sum of a vector's squares, fp64, from the norms of short rows: torch copies into fp64 all that it is to sum
    in fp64, and so would take twice the gradients' memory, and 30 times as long.

    `before` are the norms of the rows before it, where they were taken already.
    """
    rows = row_norms(flat)
    rest = torch.linalg.vector_norm(flat[len(rows) * NORM_ROW :])
    rows = torch.cat([*before, rows]) if before else rows
    return rows.double().square().sum() + rest.double().square()


def square_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each tensor, fp64; on a GPU in few kernels, however many there are."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(tensors))).double().square()
    return torch.stack([square_norm(tensor.flatten()) for tensor in tensors])
