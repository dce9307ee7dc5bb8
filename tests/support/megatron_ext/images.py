"""Images to train on, and the oracle of their models: one plain process, with running statistics by their formula."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_ext.checkpoints.header import part_name
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.iteration import SampleDivision, dealt
from megatron_ext.data.samples import Split
from megatron_ext.data.vision.images import ImageSamples
from megatron_ext.families.resnet.task import BatchNorm
from tests.support.megatron_ext.textbook import Ours, trained

CLASSES = 10


def write_images(
    prefix: Path, images: dict[str, np.ndarray], labels: dict[str, np.ndarray], classes: int = CLASSES
) -> Path:
    """Data as `tdpp data images` packs them: by split, uint8 [images, height, width, channels] and their classes."""
    for split, pixels in images.items():
        np.save(f"{prefix}-{split}.images.npy", pixels)
        np.save(f"{prefix}-{split}.labels.npy", labels[split].astype(np.int64))
    first = images["train"]
    flat = first.reshape(-1, first.shape[3]) / 255.0
    manifest = {
        "version": 1,
        "kind": "images",
        "classes": [str(number) for number in range(classes)],
        **dict(zip(("height", "width", "channels"), first.shape[1:], strict=True)),
        "mean": flat.mean(0).tolist(),
        "std": (flat.std(0) + 1e-3).tolist(),
        "splits": {split: {"images": len(pixels)} for split, pixels in images.items()},
        "made_by": "tests",
    }
    Path(f"{prefix}.json").write_text(json.dumps(manifest))
    return prefix


def make_images(folder: Path, size: int, channels: int = 1, count: int = 24) -> Path:
    """Random images of this many pixels a side, of ten classes."""
    random = np.random.default_rng(size)
    images = {
        split: random.integers(0, 256, (count, size, size, channels), np.uint8) for split in ("train", "valid", "test")
    }
    labels = {split: random.integers(0, CLASSES, count) for split in images}
    return write_images(folder / f"images-{size}", images, labels)


def plainly_trained(
    plan: Plan, divisions: Sequence[SampleDivision] | None = None
) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Losses and final state of a plan's model, as a loop over its micro-batches on one process has them.

    `divisions` say what these are in each iteration, where they change.
    """
    model = Ours(plan)
    norms = {name: module for name, module in model.stage.named_modules() if isinstance(module, BatchNorm)}
    found: dict[str, list[Tensor]] = {name: [] for name in norms}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(_noting(found[name]))
    samples = ImageSamples(
        plan.data_prefix,
        Split(plan.train.iterations * plan.global_batch_size, plan.train.seed),
        plan.model,
        plan.data_augment,
    )

    of_iterations = iter(divisions or ())

    def loss(model: Ours, numbers: Tensor) -> Tensor:
        total = torch.zeros(())
        division = next(of_iterations, None)
        sizes = plan.micro_batch_size if division is None else [division.sizes[dp] for dp in dealt(division.shares)]
        for micro in (part.numpy() for part in numbers.split(sizes)):
            batch = {name: torch.from_numpy(one) for name, one in samples.batch(micro).items()}
            model.stage.begin(int(micro[0]))
            logits = model({"images": batch["images"]})["logits"]
            target = torch.zeros_like(logits)
            rows = torch.arange(len(micro))
            target[rows, batch["label"]] += batch["share"]
            target[rows, batch["other"]] += 1 - batch["share"]
            target = target * (1 - plan.model.label_smoothing) + plan.model.label_smoothing / logits.shape[1]
            total = total - (target * logits.log_softmax(1)).sum()
        for name, norm in norms.items():
            mean, var = torch.stack(found[name]).mean(0)
            norm.running_mean.mul_(0.9).add_(0.1 * mean)
            norm.running_var.mul_(0.9).add_(0.1 * var)
            found[name].clear()
        return total / len(numbers)

    batches = None if divisions is None else [division.samples for division in divisions]
    losses, state = trained(plan, loss, model, batches)
    for block, name, tensor in model.stage.state:
        state[f"state/{part_name(block)}.{name}"] = tensor.detach().clone()
    return losses, state


def _noting(into: list[Tensor]) -> Callable[..., None]:
    def note(_: object, taken: tuple[Tensor, ...]) -> None:
        x = taken[0].detach()
        into.append(torch.stack([x.mean((0, 2, 3)), x.var((0, 2, 3))]))

    return note
