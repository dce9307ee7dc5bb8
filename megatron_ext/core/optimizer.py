"""megatron.core's optimizer, with its state in the form that checkpoints have, whatever it shares out."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.contract.train_config import KINDS
from megatron_ext.core.parameters import Parameter, shapes
from megatron_ext.core.settings import optimizer_config
from megatron_ext.parallel.comm import annotate_errors

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps, in the order of `KINDS`."""


class FlatState:
    """Where parameters lie in a flat tensor on the CPU, each in tdpp's form."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes
        self._begins: Dict[str, int] = {}
        self.numel = 0
        for name, shape in self._shapes.items():
            self._begins[name] = self.numel
            self.numel += shape.numel()

    @property
    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def view(self, name: str, flat: Tensor) -> Tensor:
        """The part of a flat tensor that belongs to the parameter `name`."""
        shape, begin = self._shapes[name], self._begins[name]
        return flat[begin : begin + shape.numel()].view(shape)


class _Held(NamedTuple):
    """What this rank's optimizer has of a parameter."""

    main: Tensor
    """Its weights in fp32, or this rank's share of them, flat."""
    optimizer: Any
    """torch's, which has its moments."""
    share: slice


class Scaler:
    """fp16's loss scale, which megatron.core keeps; 1 with other number formats."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._scalers = [one.grad_scaler for one in optimizers if getattr(one, "grad_scaler", None) is not None]

    @property
    def dynamic(self) -> bool:
        return bool(self._scalers)

    @property
    def scale(self) -> float:
        return float(self._scalers[0].scale) if self._scalers else 1.0

    def state(self) -> Optional[Dict[str, float]]:
        """What a checkpoint keeps; None without a dynamic scale."""
        if not self._scalers:
            return None
        one = self._scalers[0]
        return {"scale": self.scale, "good": one._growth_tracker, "patience": one._hysteresis_tracker}

    def load(self, state: Optional[Mapping[str, float]]) -> None:
        """Goes on from what `state` gave; begins anew where that run had no dynamic scale."""
        for one in self._scalers if state is not None else ():
            assert state is not None
            one._scale.fill_(state["scale"])
            one._growth_tracker, one._hysteresis_tracker = int(state["good"]), int(state["patience"])


class CoreOptimizer:
    """All ranks call it together."""

    def __init__(self, plan: Plan, replicas: Sequence[nn.Module], named: Mapping[str, Parameter]) -> None:
        """`replicas` are the rank's chunks as megatron.core's DistributedDataParallel has them, `named` are their
        parameters."""
        from megatron.core.optimizer import get_megatron_optimizer

        self._plan = plan
        self._named = named
        self.inner: Any = get_megatron_optimizer(optimizer_config(plan), list(replicas), use_gloo_process_groups=False)
        self._optimizers: List[Any] = [
            one for one in getattr(self.inner, "chained_optimizers", [self.inner]) if one.optimizer is not None
        ]
        self.flat = FlatState(shapes(plan, named))
        self.scaler = Scaler(self._optimizers)
        self.kinds: Tuple[str, ...] = (WEIGHTS, *KINDS[plan.train.optimizer])
        mains = [_mains(one) for one in self._optimizers]
        self._held = {name: self._find(one.tensor, mains) for name, one in named.items()}
        self.updates = 0
        """Updates made so far; skipped iterations make none."""

    def step(self, lr: float) -> Optional[float]:
        """Clips the gradients and updates the weights. Returns the norm of the whole model's gradient; None where fp16
        has overflowed, and nothing was updated."""
        for group in self.inner.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._plan.train.weight_decay * group.get("wd_mult", 1.0)
        updated, norm, _ = self.inner.step()
        if not updated:
            return None
        self.updates += 1
        return math.nan if norm is None else float(norm)

    def state(self, kinds: Optional[Sequence[str]] = None) -> Dict[str, Tensor]:
        """Return by kind, of all or some kinds, what there is of all parameters of the rank, in fp32 and laid out as
        `flat` says."""
        found = {kind: torch.zeros(self.flat.numel) for kind in kinds or self.kinds}
        for name, parameter in self._named.items():
            held = self._held[name]
            for kind, flat in found.items():
                whole = self._whole(parameter.tensor, held, kind)
                self.flat.view(name, flat).copy_(parameter.ours(whole.view(parameter.tensor.shape)))
        if (self._plan.expert or 1) > 1:
            self._share_experts(found)
        return found

    def _share_experts(self, state: Mapping[str, Tensor]) -> None:
        """Fills in the experts that other ranks of the expert group have."""
        from megatron.core import parallel_state

        group, device = parallel_state.get_expert_model_parallel_group(), torch.device(self._plan.device)
        for name in sorted(self.flat.names):  # each rank has its own first
            if ".experts." not in name:
                continue
            for flat in state.values():
                view = self.flat.view(name, flat)
                own = view.to(device, copy=True)  # zeros where another rank has it
                with annotate_errors("gathering the experts"):
                    dist.all_reduce(own, group=group)
                view.copy_(own)

    def load(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Takes over what `state` gave, in this or another layout."""
        self._make_moments(updates)
        with torch.no_grad():
            for name, parameter in self._named.items():
                theirs = {kind: parameter.theirs(self.flat.view(name, flat)) for kind, flat in state.items()}
                parameter.tensor.copy_(theirs[WEIGHTS])
                held = self._held[name]
                for kind, whole in theirs.items() if held is not None else ():
                    assert held is not None
                    target = self._tensor(held, kind)
                    target.copy_(whole.flatten()[held.share].view(target.shape))
        self.updates = updates

    def _whole(self, parameter: nn.Parameter, held: Optional[_Held], kind: str) -> Tensor:
        """What there is of a parameter, put together where replicas share it out."""
        if not self._plan.sharded_optimizer:
            assert held is not None
            return self._tensor(held, kind).float()
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if held is not None:
            whole[held.share] = self._tensor(held, kind).float().flatten()
        with annotate_errors("gathering the checkpoint"):
            dist.all_reduce(whole, group=self._replicas(parameter))
        return whole

    def _replicas(self, parameter: nn.Parameter) -> Any:
        """Those that have the same parameter."""
        from megatron.core import parallel_state

        if not getattr(parameter, "allreduce", True):  # an expert's
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def _tensor(self, held: _Held, kind: str) -> Tensor:
        if kind == WEIGHTS:
            return held.main
        moments: Mapping[str, Tensor] = held.optimizer.state[held.main]
        name = _MOMENTS[self.kinds.index(kind) - 1]
        return moments[name] if name in moments else torch.zeros_like(held.main)  # before the first step

    def _find(self, parameter: nn.Parameter, mains: Sequence[Mapping[int, Tensor]]) -> Optional[_Held]:
        """What is held of a parameter; None where other replicas have all of it."""
        for one, own in zip(self._optimizers, mains):
            if hasattr(one, "model_param_gbuf_map"):  # shared out over replicas
                if parameter in one.model_param_group_index_map:
                    group, number = one.model_param_group_index_map[parameter]
                    part = one._get_model_param_range_map(parameter)["param"]
                    main = one.optimizer.param_groups[group]["params"][number]
                    return _Held(main, one.optimizer, slice(part.start, part.end))
            elif id(parameter) in own:
                return _Held(own[id(parameter)], one.optimizer, slice(0, parameter.numel()))
        return None

    def _make_moments(self, updates: int) -> None:
        """Has each optimizer keep what it would make in its first step."""
        if not updates:
            return
        for one in self._optimizers:
            of_torch = type(one.optimizer).__module__.startswith("torch.")
            for group in one.optimizer.param_groups:
                if not of_torch:  # Transformer Engine and Apex count by group
                    group["step"] = updates
                for main in group["params"]:
                    state = one.optimizer.state[main]
                    for name in _MOMENTS:
                        state.setdefault(name, torch.zeros_like(main.data))
                    if of_torch:
                        state["step"] = torch.tensor(float(updates))


def _mains(optimizer: Any) -> Dict[int, Tensor]:
    """The fp32 weights of an optimizer that shares nothing out, by the ids of the parameters that they are of."""
    found: Dict[int, Tensor] = {}
    if hasattr(optimizer, "fp32_from_float16_groups"):
        for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups):
            found.update((id(model), main) for model, main in zip(models, mains))
        for mains in optimizer.fp32_from_fp32_groups:
            found.update((id(main), main) for main in mains)
        return found
    return {id(main): main for group in optimizer.optimizer.param_groups for main in group["params"]}
