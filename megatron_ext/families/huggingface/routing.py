"""How layers of transformers share tokens out to their experts: what is counted of it, and the loss that balances it.

Layers add what they find to tensors that go over wires of their own, for the loss is no sum over layers: it multiplies
means over all of them (Fedus et al. 2021, equations 4 to 6, as transformers computes it).
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.anatomy import owner_of
from megatron_ext.families.huggingface.library import layers_of
from megatron_ext.families.huggingface.weights import base_of
from megatron_ext.tasks.task import Wire

ASKED = "output_router_logits"
"""The key of a configuration that has transformers add the loss."""
BALANCED = "load_balancing_loss"
"""The name of the metric."""
TABLE, BALANCE = "experts", "balance"
"""The names of the wires, before the number of the layer that takes them."""


class Router(NamedTuple):
    """Where a layer's router is, and where in what it returns the logits are."""

    name: str
    place: int


class Balance(NamedTuple):
    """The loss of a model whose configuration asks for it."""

    factor: float
    experts: int
    chosen: int
    """Experts for each token."""
    routers: Sequence[Sequence[Router]]
    """Those of each layer."""

    def found(self, logits: Sequence[Tensor]) -> Tensor:
        """[2, experts]: which part of the tokens chooses each expert, and its mean probability. The sum over these
        routers, of `logits` [tokens, experts] each, divided by the number of all routers of the model."""
        total = torch.zeros(2, self.experts, device=logits[0].device)
        for one in logits:
            weights = one.softmax(-1)
            chosen = _counted(weights.topk(self.chosen, -1).indices, self.experts)
            total = total + torch.stack([chosen, weights.float().sum(0)]) / len(weights)
        return total / sum(map(len, self.routers))

    def loss(self, total: Tensor) -> Tensor:
        """What `found` gives, summed over all layers, as a loss that is 1 times `chosen` where all is even."""
        return (total[0] * total[1]).sum() * self.experts


class Routed(NamedTuple):
    """What a layer adds up about its experts."""

    row: int
    """Its own, of the table that it adds to."""
    experts: Optional[str]
    """Its module of them; None: it adds nothing to the table."""
    routers: Sequence[Router]
    balance: Optional[Balance]
    """None: it adds nothing to the loss."""


class Routing:
    """The wires over which layers add up what their experts get."""

    def __init__(self, model: nn.Module) -> None:
        """Changes the model's configuration so that its own forward pass adds no loss. Raises EngineError: the
        configuration asks for a loss that is computed in another way than those that are known."""
        root, _ = base_of(model)
        path, row = layers_of(model)
        layers = list(row)
        self.balance = _balance_of(root, owner_of(model, path), layers)
        names, count = _experts_of(layers)
        rows = sum(name is not None for name in names) if count else 0
        self.wires: List[Wire] = []
        self.layers: List[Optional[Routed]] = []
        self.takes: List[Tuple[str, ...]] = []
        """The wires that each layer takes behind all others; those that it gives are its `gives`."""
        self.gives: List[Tuple[str, ...]] = []
        self.first: List[Wire] = []
        """Those that begin with zeros before the first layer."""
        last: Dict[str, Wire] = {}
        if rows:
            last[TABLE] = Wire(f"{TABLE}.0", (rows, count), torch.float32, False)
        if self.balance is not None:
            last[BALANCE] = Wire(f"{BALANCE}.0", (2, self.balance.experts), torch.float32, exact=True)
        self.first = list(last.values())
        self.wires = list(last.values())
        place = 0
        for number, name in enumerate(names):
            routers = () if self.balance is None else self.balance.routers[number]
            adds = [*([TABLE] if rows and name else []), *([BALANCE] if routers else [])]
            self.takes.append(tuple(last[one].name for one in adds))
            for one in adds:
                last[one] = last[one]._replace(name=f"{one}.{number + 1}")
                self.wires.append(last[one])
            self.gives.append(tuple(last[one].name for one in adds))
            routed = Routed(place, name if TABLE in adds else None, routers, self.balance if routers else None)
            self.layers.append(routed if adds else None)
            place += TABLE in adds
        self.last = {one: wire.name for one, wire in last.items()}
        """The wire that has the sums over all layers, by `TABLE` and `BALANCE`."""


def _balance_of(root: Any, owner: Any, layers: Sequence[nn.Module]) -> Optional[Balance]:
    """Find the loss that transformers adds for a model; None: it adds none."""
    function = getattr(sys.modules[type(root).__module__], "load_balancing_loss_func", None)
    asked = getattr(root.config, ASKED, False)
    for config in (root.config, owner.config):
        if getattr(config, ASKED, False):
            setattr(config, ASKED, False)
    factor = getattr(root, "router_aux_loss_coef", getattr(root, "aux_loss_coef", None))
    if not asked or function is None or factor is None:
        return None
    routers = [list(_routers(owner, layer)) for layer in layers]
    found = Balance(float(factor), int(root.num_experts), int(root.num_experts_per_tok), routers)
    source = torch.Generator().manual_seed(0)
    logits = [torch.randn(8, found.experts, generator=source) for _ in range(max(1, sum(map(len, routers))))]
    expected = function(tuple(logits), found.experts, found.chosen)
    if not any(routers) or not torch.allclose(torch.as_tensor(expected), found.loss(found.found(logits)), 1e-4):
        raise EngineError(
            f"{ASKED}=true has transformers add a loss to a {type(root).__name__} that balances its experts, and tdpp "
            f"does not know how this family computes it; train without it: {ASKED}=false in config.json"
        )
    return found


def _routers(owner: Any, layer: nn.Module) -> Iterator[Router]:
    """Those that transformers itself takes logits from."""
    known = getattr(owner, "_can_record_outputs", None) or {}
    given = known.get("router_logits", ())
    for one in given if isinstance(given, list) else [given]:
        target = getattr(one, "target_class", one)
        for name, module in layer.named_modules():
            within = (getattr(one, "layer_name", None) or "").strip(".")
            if isinstance(target, type) and isinstance(module, target) and (not within or f".{within}." in f".{name}."):
                yield Router(name, getattr(one, "index", 1))


def _experts_of(layers: Sequence[nn.Module]) -> Tuple[List[Optional[str]], int]:
    """Finds for each layer the name of its only module of experts, or None; and the number of experts, 0 where layers
    differ."""
    names: List[Optional[str]] = []
    counts: Set[int] = set()
    for layer in layers:
        found = [(name, one) for name, one in layer.named_modules() if _holds_experts(one)]
        names.append(found[0][0] if len(found) == 1 else None)
        counts.update(int(one.num_experts) for _, one in found)
    return names, counts.pop() if len(counts) == 1 and any(names) else 0


def _holds_experts(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    return isinstance(count, int) and any(
        one.dim() == 3 and len(one) == count for one in module.parameters(recurse=False)
    )


def _counted(chosen: Tensor, experts: int) -> Tensor:
    """Count how often each expert is chosen; a number behind theirs, as an identity expert has in some families, is
    not. Unlike torch's bincount, this does not have the host wait for a GPU, and unlike one_hot, it takes no memory for
    each token."""
    places = chosen.flatten().clamp(max=experts)
    counts = torch.zeros(experts + 1, device=chosen.device)
    return counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.float32))[:experts]


class Watch:
    """What a layer's forward pass gives to its experts, and what its routers return."""

    def __init__(self, layer: nn.Module, experts: Optional[str], routers: Sequence[Router]) -> None:
        self._seen = threading.local()
        modules: Dict[str, nn.Module] = dict(layer.named_modules())
        if experts is not None:
            modules[experts].register_forward_pre_hook(self._given, with_kwargs=True)
        for router in routers:
            modules[router.name].register_forward_hook(
                lambda _, args, out, at=router.place: self._seen.logits.append(
                    out[at] if isinstance(out, tuple) else out
                )
            )

    def begin(self) -> None:
        self._seen.logits, self._seen.chosen = [], []

    @property
    def logits(self) -> List[Tensor]:
        """Those of the routers, [tokens, experts] each."""
        found: List[Tensor] = self._seen.logits
        return [one.flatten(0, -2) for one in found]

    def loads(self, experts: int) -> Tensor:
        """[experts]: how many times as many tokens as the mean each expert has got."""
        chosen: List[Tensor] = self._seen.chosen
        if not chosen:
            return torch.zeros(experts)
        counts = _counted(chosen[0], experts)
        return counts * experts / counts.sum().clamp(min=1)

    def _given(self, module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        whole = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dtype == torch.int64]
        self._seen.chosen += [one.detach() for one in whole[:1]]
