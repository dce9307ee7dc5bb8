"""How weights follow their gradients: Adam, SGD with momentum and LAMB, each on a rank's share of the flat weights.

The formulas and their sources are in docs/training.md. Biases and norms do not decay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.contract.train_config import ADAM, ADAMW, KINDS, LAMB, SGD, TrainConfig
from megatron_ext.parallel.comm import all_reduce

NORM_ROW = 1024
"""Squares that are summed in fp32: few enough for an error far below that of the gradients themselves."""


def recounted(train: TrainConfig, updates: int, instead: int) -> Dict[str, float]:
    """By kind, the factor of moments that had so many updates, for the same means where they count as others."""
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


class UpdateRule(ABC):
    """Steps `master` [n], fp32, by its gradient."""

    def __init__(self, master: nn.Parameter, pieces: Sequence[Piece], train: TrainConfig) -> None:
        self.kinds = KINDS[train.optimizer]
        self._master = master
        self._train = train
        self._decaying = [piece.here for piece in pieces if piece.decays and piece.here.start < piece.here.stop]

    @abstractmethod
    def step(self, lr: float, updates: int, here: slice) -> None:
        """One update, after so many before it, of the weights `here`, which are all or whole parts of them."""

    @abstractmethod
    def state(self) -> Dict[str, Tensor]:
        """By kind, [n]; zeros before the first update."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Takes over copies of what `state` gave."""


class TorchRule(UpdateRule):
    """An optimizer of torch's; it gets no weight decay, so that its state stays one flat tensor for each kind and part.

    Parts that are stepped one by one are parameters of their own, which share the memory of the master weights.
    """

    def __init__(
        self,
        master: nn.Parameter,
        pieces: Sequence[Piece],
        train: TrainConfig,
        parts: Sequence[Tuple[slice, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
    ) -> None:
        """`optimizer` has the `parts`; `names` are torch's, of the state of each kind."""
        super().__init__(master, pieces, train)
        self._parts = parts
        self._optimizer = optimizer
        self._names = dict(zip(self.kinds, names))

    def step(self, lr: float, updates: int, here: slice) -> None:
        decay, gradient = self._train.weight_decay, self._master.grad
        assert gradient is not None
        for piece in self._decaying:
            both = slice(max(piece.start, here.start), min(piece.stop, here.stop))
            if both.start >= both.stop:
                continue
            weight = self._master.data[both]
            if self._train.optimizer == ADAMW:
                weight.mul_(1.0 - lr * decay)
            elif decay:
                gradient[both].add_(weight, alpha=decay)
        if len(self._parts) > 1:
            for part, parameter in self._parts:  # torch steps those that have a gradient
                inside = here.start <= part.start and part.stop <= here.stop
                parameter.grad = gradient[part] if inside else None
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()

    def state(self) -> Dict[str, Tensor]:
        return {kind: self._whole(name) for kind, name in self._names.items()}

    def load(self, state: Mapping[str, Tensor], updates: int) -> None:
        for part, parameter in self._parts:
            found: Dict[str, Any] = {
                # Copies on a CPU, too: a view would keep what the other replicas have of them in memory.
                name: state[kind][part].to(parameter, copy=True)
                for kind, name in self._names.items()
            }
            if self._train.optimizer in (ADAM, ADAMW):
                found["step"] = torch.tensor(float(updates), device=parameter.device if parameter.is_cuda else "cpu")
            self._optimizer.state[parameter] = found

    def _whole(self, name: str) -> Tensor:
        """What torch keeps by this name, of all parts."""
        kept = [self._optimizer.state.get(parameter, {}).get(name) for _, parameter in self._parts]
        found = [
            torch.zeros_like(parameter.data) if one is None else one for one, (_, parameter) in zip(kept, self._parts)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)


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

    def step(self, lr: float, updates: int, here: slice) -> None:
        train, weights, gradient = self._train, self._master.data, self._master.grad
        assert gradient is not None
        assert here == slice(0, len(weights)), "the norms are those of whole matrices"
        self._m.mul_(train.adam_beta1).add_(gradient, alpha=1.0 - train.adam_beta1)
        self._v.mul_(train.adam_beta2).addcmul_(gradient, gradient, value=1.0 - train.adam_beta2)
        denominator = (self._v / (1.0 - train.adam_beta2 ** (updates + 1))).sqrt_().add_(train.adam_eps)
        update = (self._m / (1.0 - train.adam_beta1 ** (updates + 1))).div_(denominator)
        for piece in self._decaying:
            update[piece].add_(weights[piece], alpha=train.weight_decay)
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
        rows = [
            torch.stack([square_norm(of[piece.here]) for piece in self._scaled]) for of in (self._master.data, update)
        ]
        squares = torch.stack(rows)
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
    parts = [(slice(0, len(master)), master)]
    if cuts:
        slices = [slice(start, stop) for start, stop in zip([0, *cuts], [*cuts, len(master)])]
        parts = [(here, nn.Parameter(master.data[here])) for here in slices]
    stepped = [parameter for _, parameter in parts]
    if train.optimizer == SGD:
        sgd = torch.optim.SGD(stepped, lr=0.0, momentum=train.momentum, nesterov=train.nesterov)
        return TorchRule(master, pieces, train, parts, sgd, ["momentum_buffer"])
    adam = torch.optim.Adam(
        stepped,
        lr=0.0,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        fused=master.is_cuda or torch.__version__ >= "2.4",  # before, it knew no CPU
    )
    return TorchRule(master, pieces, train, parts, adam, ["exp_avg", "exp_avg_sq"])


def row_norms(flat: Tensor) -> Tensor:
    """Of as many whole rows as there are."""
    whole = len(flat) // NORM_ROW * NORM_ROW
    norms: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
    return norms


def square_norm(flat: Tensor, before: Sequence[Tensor] = ()) -> Tensor:
    """The sum of a vector's squares, fp64, from the norms of short rows: torch copies into fp64 all that it is to sum
    in fp64, and so would take twice the gradients' memory, and 30 times as long.

    `before` are the norms of the rows before it, where they were taken already.
    """
    rows = row_norms(flat)
    rest = torch.linalg.vector_norm(flat[len(rows) * NORM_ROW :])
    rows = torch.cat([*before, rows]) if before else rows
    square: Tensor = rows.double().square().sum() + rest.double().square()
    return square
