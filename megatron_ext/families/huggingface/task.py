"""A causal model of transformers as a task: its own layers, cut into blocks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from torch import Tensor, nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.families.huggingface.anatomy import Anatomy
from megatron_ext.families.huggingface.blocks import Embedding, Head, keeps_apart, layer_of, require_positions
from megatron_ext.families.huggingface.library import made
from megatron_ext.families.huggingface.lora import Adapters, is_adapter
from megatron_ext.families.huggingface.routing import BALANCE, BALANCED, TABLE, Routing
from megatron_ext.families.huggingface.shares import Shares
from megatron_ext.families.huggingface.weights import Published, save
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup
from megatron_ext.tasks.language.language_task import NextTokenTask
from megatron_ext.tasks.repeatable import repeatable
from megatron_ext.tasks.task import SEQUENCE, Block, Micro, Placement, Tensors, Wire, ties

TOKENS, POSITIONS, LOGITS = "tokens", "positions", "logits"
FIRST, LAST = "embedding", "head"
"""The names of what stands before the layers, and behind them."""
RANDOM = ("drop", "jitter")
"""In the names of a configuration's numbers by which a layer draws random ones."""


class HuggingFaceTask(NextTokenTask):
    """Predicts the next token, with the layers and initial weights of transformers."""

    inputs: Tuple[str, ...] = (TOKENS,)
    outputs: Tuple[str, ...] = (LOGITS,)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._published: Optional[Published] = None
        model = made(plan.model)
        self._routing = routing = Routing(model)
        anatomy = Anatomy(model, plan.model.sequence_length, plan.model.vocab_size)
        self.anatomy = anatomy
        if self.packs:
            require_positions(model, anatomy.name)
        layers = len(anatomy.layers)
        if layers != plan.model.layers:
            raise EngineError(f"model.layers={plan.model.layers}, but model.config={plan.model.config} has {layers}")
        self._shares = Shares(anatomy)
        for size in {*plan.layout.tensors} - {1}:
            self._shares.require(size)
        self._adapters: Optional[Adapters] = None
        if plan.train.lora_rank is not None:
            self._adapters = Adapters(plan.train, list(anatomy.layers), anatomy.name, self._shares)
        names = [f"hidden.{number}" for number in range(layers + 1)]
        self.inputs = (TOKENS, POSITIONS) if self.packs else (TOKENS,)
        placed = [POSITIONS] if self.packs else []
        extra = [*([TOKENS] if anatomy.by_tokens else []), *placed]
        before = [one.wire for of in anatomy.crossing for one in of if one.other is None]
        seed, again = plan.train.seed, plan.recompute == "full"
        draws = seed if _draws(anatomy.config) else None
        layer = partial(layer_of, anatomy, self._shares, seed, self.packs)
        block = partial(_made, seed=draws, again=again, adapters=self._adapters)
        self.blocks = [
            Block(
                *(FIRST, FIRST, (TOKENS, *placed), (names[0], *(one.name for one in (*before, *routing.first)))),
                partial(block, FIRST, partial(Embedding, anatomy, self._shares, seed, routing.first)),
                Placement.FIRST,
            ),
            *(
                Block(
                    *(f"layers.{number}", anatomy.kinds[number]),
                    (
                        names[number],
                        *extra,
                        *(one.wire.name for one in anatomy.crossing[number]),
                        *routing.takes[number],
                    ),
                    (names[number + 1], *(one.wire.name for one in anatomy.gives(number)), *routing.gives[number]),
                    partial(block, f"layers.{number}", partial(layer, number, routed=routing.layers[number])),
                )
                for number in range(layers)
            ),
            Block(
                *(LAST, LAST, (names[-1],), (LOGITS,)),
                partial(block, LAST, partial(Head, anatomy, self._shares, seed)),
                Placement.LAST,
            ),
        ]
        wires = [self._wire(anatomy.hidden, number)._replace(name=name) for number, name in enumerate(names)]
        for number, of in enumerate(anatomy.crossing):
            wires += [self._wire(one.wire, 0 if one.other is None else number) for one in of]
        logits = Wire(LOGITS, ("batch", SEQUENCE, *anatomy.logits))
        self.wires = {wire.name: wire for wire in (*wires, *routing.wires, logits)}
        self.outputs = (LOGITS, *routing.last.values())
        self.tied = _tied(anatomy) if self._adapters is None else {}

    def keeps_apart(self) -> bool:
        """Tries, before a run, whether layers keep documents apart that share a sample; False: some are too large.
        Raises EngineError: they do not."""
        kinds = self.anatomy.kinds if self.packs else []
        return all(keeps_apart(self.anatomy, kinds.index(kind), self._plan.train.seed) for kind in {*kinds})

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """Nothing: blocks are made with their weights."""

    def published(self, files: Mapping[str, Path], block: str) -> Dict[str, Tensor]:
        """A block's weights."""
        if self._published is None:
            self._published = Published(made(self._model), files)
        names = {self._name(f"{block}.{inner}"): inner for inner in self._inner(block)}
        found = {names[name]: one for name, one in self._published.of(list(names)).items()}
        return found if self._adapters is None else {**found, **self._adapters.beside(block, found)}

    def publish(self, content: Callable[[str], Dict[str, Tensor]], folder: Path, adapters: bool = False) -> None:
        """Makes `folder` one that from_pretrained loads, or, of adapters alone, peft."""
        tensors = {
            self._name(f"{block.name}.{inner}"): one
            for block in self.blocks
            for inner, one in content(block.name).items()
        }
        if self._adapters is None and adapters:
            raise EngineError("the run has trained the whole model and no adapters (train.lora_rank)")
        if self._adapters is not None and adapters:
            self._adapters.save(tensors, folder, self._plan.train.load)
        else:
            save(made(self._model), tensors if self._adapters is None else self._adapters.merged(tensors), folder)

    def _wire(self, wire: Wire, layer: int) -> Wire:
        """A wire that comes from before this layer; without a gradient, where nothing is trained there."""
        if self._adapters is None or self._adapters.trained_before(layer):
            return wire
        return wire._replace(gradient=False)

    def _inner(self, block: str) -> List[str]:
        """The names of a block's tensors in it."""
        if block in (FIRST, LAST):
            held = self.anatomy.first if block == FIRST else self.anatomy.last
            return [
                f"{name}.{key}"
                for name, module in self.anatomy.model.named_modules()
                if name in held
                for key in module.state_dict()
            ]
        return list(self.anatomy.layers[int(block.rpartition(".")[2])].state_dict())

    def _name(self, name: str) -> str:
        """The name in transformers' model of what has this one here."""
        block, _, inner = name.partition(".")
        return inner if block in (FIRST, LAST) else f"{self.anatomy.path}.{inner}"

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        found = super().loss(left, micro, tensor if self._shares.vocabulary else TensorGroup())
        balance = self._routing.balance
        return found if balance is None else found + balance.factor * self._balanced(left, micro)

    def metrics(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensors:
        return {} if self._routing.balance is None else {BALANCED: self._balanced(left, micro)}

    def expert_loads(self, left: Tensors, micro: Micro) -> Optional[Tensor]:
        wire = self._routing.last.get(TABLE)
        return None if wire is None else left[wire] * _weight(micro)

    def evaluated(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """The perplexity is that of the tokens' loss alone."""
        balance = self._routing.balance
        added = 0.0 if balance is None else balance.factor * means[BALANCED]
        return {**super().evaluated({**means, "loss": means["loss"] - added}), **means}

    def _balanced(self, left: Tensors, micro: Micro) -> Tensor:
        """The loss that balances experts over the tokens of a micro-batch, which counts as often as its tokens do."""
        assert self._routing.balance is not None
        return self._routing.balance.loss(left[self._routing.last[BALANCE]]) * _weight(micro)

    def shard(self, name: str) -> Optional[Shard]:
        block, _, inner = name.partition(".")
        if block in (FIRST, LAST):
            return None if self.rows(name) is None else Shard(0)
        number, _, inner = inner.partition(".")
        if self._adapters is not None and is_adapter(inner):
            return self._adapters.shard(int(number), inner)
        return self._shares.layers[int(number)].get(inner)

    def rows(self, name: str) -> Optional[int]:
        block, _, inner = name.partition(".")
        return self._shares.rows.get(inner) if block in (FIRST, LAST) else None


def _weight(micro: Micro) -> Any:
    """What a mean over a micro-batch's tokens is multiplied by to become what the loss is, a mean or a sum."""
    return 1.0 if micro.weight is None else micro.weight.reshape(())


def _made(name: str, make: Any, tensor: TensorGroup, seed: Any, again: bool, adapters: Optional[Adapters]) -> nn.Module:
    module: nn.Module = make(tensor)
    if adapters is not None:
        adapters.attach(name, module, tensor)
    return module if seed is None and not again else repeatable(module, name, seed, again)


def _draws(config: Any) -> bool:
    """Whether a configuration has layers draw random numbers."""
    numbers = {key: value for key, value in config.to_dict().items() if any(word in key for word in RANDOM)}
    return any(isinstance(value, float) and value > 0 for value in numbers.values())


def _tied(anatomy: Anatomy) -> Any:
    """Parameters that are in several blocks."""
    named: List[Tuple[str, Any]] = []
    for block, held in ((FIRST, anatomy.first), (LAST, anatomy.last)):
        for name, module in anatomy.model.named_modules():
            if name in held:
                named += [(f"{block}.{name}.{key}", one) for key, one in module.named_parameters(recurse=False)]
        if block == FIRST:
            for number, layer in enumerate(anatomy.layers):
                named += [(f"layers.{number}.{key}", one) for key, one in layer.named_parameters()]
    return ties(named)


TASK = HuggingFaceTask
