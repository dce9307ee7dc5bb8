"""Models that say what is on an image, in blocks that lie one behind another."""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from functools import partial
from typing import Callable, Dict, List, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from megatron_ext.contract.models.images import StackedFamily, image_blocks
from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import Samples, Split
from megatron_ext.data.vision.images import ImageSamples, open_images
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.linear import WeightGradients, linear
from megatron_ext.tasks.repeatable import repeatable
from megatron_ext.tasks.task import DTYPES, Block, Micro, Placement, Task, Tensors, Wire


def empty_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return skip_init(nn.Linear, inputs, outputs, bias=bias, device=_device())  # type: ignore[no-untyped-call]


def empty_convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, bias: bool = True
) -> nn.Conv2d:
    return skip_init(  # type: ignore[no-untyped-call]
        nn.Conv2d, inputs, outputs, kernel, stride, padding, bias=bias, device=_device()
    )


def _device() -> torch.device:
    """The one that tensors are made on."""
    return torch.empty(0).device


LOGITS = "logits"
TOP = 5
"""Classes that may hold the right one, of the second metric."""


class ImageTask(Task):
    """Classes of images. Its loss is a sum over the images, each of which counts the same."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._model = model = plan.model
        self._dtype = DTYPES[plan.train.precision]
        self.inputs = ("images",)
        self.outputs = (LOGITS,)
        described = image_blocks(model)
        wires = ["images", *(f"hidden.{number}" for number in range(len(described) - 1)), LOGITS]
        makers = self.makers()
        self.blocks = [
            Block(
                one.name,
                one.kind,
                (wires[number],),
                (wires[number + 1],),
                partial(_made, makers[number], one.name, plan.train.seed, plan.recompute == "full"),
                Placement.COUNTED if one.counted else Placement.LAST if number else Placement.FIRST,
            )
            for number, one in enumerate(described)
        ]
        self.wires = {name: Wire(name, ("batch", *one.gives)) for name, one in zip(wires[1:], described)}

    def sizes(self, micro_batch_size: int) -> Dict[str, int]:
        return {"batch": micro_batch_size}

    def samples(self, split: str, count: int) -> Samples:
        plan = self._plan
        return ImageSamples(plan.data_prefix, Split(count, plan.train.seed, name=split), self._model, plan.data_augment)

    def epoch(self, split: str) -> Optional[int]:
        return len(open_images(self._plan.data_prefix, split).images)

    def micro(self, sample: Tensors) -> Micro:
        """`images` [micro-batch size, channels, height, width], where a stage takes them; and what the loss takes,
        [micro-batch size] each: `label`, `other`, the class that is mixed in, and `share`, the part that is not."""
        inputs = {"images": sample["images"].to(self._dtype)} if "images" in sample else {}
        targets = {name: sample[name] for name in ("label", "other", "share")}
        weight = torch.full((), float(len(targets["label"])), device=targets["label"].device)
        return Micro(inputs, targets, weight=weight)

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        model = self._model
        assert model.image_size is not None and model.classes is not None
        label = torch.randint(model.classes, (micro_batch_size,), generator=source)
        shape = (micro_batch_size, model.channels, model.image_size, model.image_size)
        images = torch.randn(shape, generator=source)
        return self.micro({"images": images, "label": label, "other": label, "share": torch.ones(micro_batch_size)})

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """The sum of the cross-entropies."""
        targets, logits = micro.targets, left[LOGITS].float()

        def entropy(of: str) -> Tensor:
            smoothing = self._model.label_smoothing
            return F.cross_entropy(logits, targets[of], reduction="none", label_smoothing=smoothing)

        if self._plan.data_augment is None:
            return entropy("label").sum()
        share = targets["share"]
        return (share * entropy("label") + (1.0 - share) * entropy("other")).sum()

    def metrics(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensors:
        """Images whose class is the likeliest, or one of the five likeliest; of a mixed one, its larger part's."""
        targets, logits = micro.targets, left[LOGITS]
        label = torch.where(targets["share"] >= 0.5, targets["label"], targets["other"])[:, None]
        likeliest = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
        found = {"top-1": (likeliest[:, :1] == label).sum()}
        if logits.shape[1] > TOP:
            found[f"top-{TOP}"] = (likeliest == label).sum()
        return found

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """Normal numbers: for ReLU as He et al. 2015, in transformers as Glorot and Bengio 2010, positions and class
        tokens with 0.02; norms begin as the identity, biases as 0."""
        if parameter.is_meta:
            return
        std = self._std(name, parameter)
        if std is None:
            parameter.fill_(1.0 if name.endswith(".weight") else 0.0)
            return
        source = torch.Generator().manual_seed(zlib.crc32(name.encode(), self._plan.train.seed))
        parameter.normal_(0.0, std, generator=source)

    def _std(self, name: str, parameter: Tensor) -> Optional[float]:
        """Return the standard deviation of the normal numbers; None: there are none."""
        if name.endswith((".position", ".class_token")):
            return 0.02
        if parameter.dim() == 1:
            return None
        return self.std_of_weight(parameter)

    def std_of_weight(self, weight: Tensor) -> float:
        """Return the standard deviation of a matrix or a convolution's kernel: as Glorot and Bengio 2010 for
        transformers."""
        return math.sqrt(2.0 / (weight.shape[0] + weight[0].numel()))

    @abstractmethod
    def makers(self) -> Sequence[Callable[[], nn.Module]]:
        """What makes the module of each of the model's blocks."""


def _made(maker: Callable[[], nn.Module], name: str, seed: int, recompute: bool, tensor: TensorGroup) -> nn.Module:
    module = maker()
    draws = any(_draws(part) for part in module.modules())
    return repeatable(module, name, seed if draws else None, recompute) if draws or recompute else module


def _draws(module: nn.Module) -> bool:
    return bool(getattr(module, "draws", isinstance(module, nn.Dropout) and module.p > 0))


class ConvolutionalTask(ImageTask):
    """Blocks with ReLU, whose weights begin as such blocks need."""

    def std_of_weight(self, weight: Tensor) -> float:
        """Return the standard deviation of He et al. 2015; the logits have no ReLU behind them."""
        outputs, inputs = weight.shape[0], weight[0].numel()
        if weight.dim() == 4:
            return math.sqrt(2.0 / (outputs * weight[0, 0].numel()))
        return math.sqrt((1.0 if outputs == self._model.classes else 2.0) / inputs)


class StackedTask(ConvolutionalTask):
    """AlexNet and VGG, whose descriptions say how they differ."""

    def makers(self) -> List[Callable[[], nn.Module]]:
        model, family, blocks = self._model, self._model.traits, image_blocks(self._model)
        assert isinstance(family, StackedFamily)
        found: List[Callable[[], nn.Module]] = []
        first = next(number for number, block in enumerate(blocks) if block.name == "linear.0")
        for number, block in enumerate(blocks[:first]):
            outputs, inputs, kernel, _ = block.parameters["conv.weight"]
            found.append(partial(Convolution, inputs, outputs, kernel, *family.window(model, number)))
        for number, block in enumerate(blocks[first:]):
            outputs, inputs = block.parameters["linear.weight"]
            places = 0 if number else family.most_places
            last, dropout = number == 2, model.hidden_dropout
            found.append(
                partial(Linear, inputs, outputs, dropout, places=places, drops_first=family.drops_first, last=last)
            )
        return found


class Convolution(nn.Module):
    """A convolution with ReLU, and a pool over `pool` x `pool` places, every second one, where there is one."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, padding: int, pool: int) -> None:
        super().__init__()
        self.conv = empty_convolution(inputs, outputs, kernel, stride, padding)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return F.max_pool2d(x, self.pool, 2) if self.pool else x


class Linear(nn.Module):
    """A linear layer of a classifier, which sees at most `places` x `places` of an image's map."""

    def __init__(
        self, inputs: int, outputs: int, dropout: float, *, places: int = 0, drops_first: bool, last: bool
    ) -> None:
        """Dropout comes before the layer (AlexNet), or behind it and its ReLU (VGG); the last one has no ReLU."""
        super().__init__()
        self.later: Optional[WeightGradients] = None
        """Where its weight's gradient is left to: VGG's largest matrix has three quarters of the model."""
        self.linear = empty_linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)
        self.places = places
        self.drops_first = drops_first
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        if self.places:
            side = min(x.shape[-1], self.places)
            x = (F.adaptive_avg_pool2d(x, side) if side < x.shape[-1] else x).flatten(1)
        if self.last:
            return self._linear(x)
        if self.drops_first:
            return F.relu(self._linear(self.dropout(x)))
        return self.dropout(F.relu(self._linear(x)))

    def _linear(self, x: Tensor) -> Tensor:
        return linear(x, self.linear.weight, self.linear.bias, self.later)
