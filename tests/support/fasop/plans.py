"""Trainings and nodes that tests search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conf.compose import compose
from conf.schema.experiment import Experiment
from fasop.costs.hardware import NodeKind, node_kinds
from fasop.costs.training import Training
from fasop.simulation.nodes import Nodes
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.replica_pipelines import by_replica

MEGATRON = ("engine=megatron_lm", "engine.checkout=/opt/megatron-lm", "train.precision=fp16")
"""What the published runs were: Megatron-LM in fp16."""


FP32 = "train.precision=fp32"
"""In which a number takes the same bytes everywhere; the seeds train in fp16."""


def experiment(*overrides: str) -> Experiment:
    return compose(["experiment=seed_a10x8", FP32, *overrides])


def mixed(*overrides: str) -> Experiment:
    return compose(["experiment=seed_a100x1_a10x7", FP32, *overrides])


def training(*overrides: str, **sizes: Any) -> Training:
    """GPT-2 XL in fp32 by the seed's plan, with other keys of `parallel`."""
    whole = Training.of(experiment(*overrides))
    return replace(whole, parallel=replace(whole.parallel, **sizes))


def kinds(one: Experiment) -> Sequence[NodeKind]:
    return node_kinds(one.cluster)


def pipelines(training: Training, kinds: Sequence[NodeKind], orders: np.ndarray) -> Pipelines:
    """On nodes of these kinds, in each of the orders [pipelines, nodes]."""
    return by_replica(training, Nodes(kinds, orders))


def built(one: Experiment, order: Sequence[int], **sizes: Any) -> Pipelines:
    """One pipeline on nodes of these kinds."""
    whole = Training.of(one)
    whole = replace(whole, parallel=replace(whole.parallel, **sizes))
    return pipelines(whole, kinds(one), np.array([order]))


def column(*layers: int) -> np.ndarray:
    return np.array([layers]).T
