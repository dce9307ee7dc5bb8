"""What is said to save memory, or to work while something else goes on, does so: a result alone does not show it."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.samples import Samples, Split
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.gradients import flat
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.gradients.reduce import GradientReducer
from megatron_ext.families.tasks import stage_of, task_of
from megatron_ext.parallel.groups import Groups
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.transformer import TransformerLayer
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Tensors
from megatron_ext.timeline.recorder import Recorder
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun

NO_GROUPS = Groups()
ONE_STAGE = ("parallel.data=1", "parallel.pipeline=1", "parallel.micro_batch_size=2")


def first_rank(plan: Plan, samples: Samples | None = None) -> Engine:
    """Its engine, as long as it talks to no other rank."""
    return Engine(plan, task_of(plan), plan.ranks[0], NO_GROUPS, cast(Samples, samples), Recorder(None))


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is all the ranks there are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("recompute", "linears", "cores"),
    [("none", 4, 1), ("selective", 4, 2), ("full", 8, 2)],
    ids=lambda value: str(value),
)
def test_a_layer_computes_again_what_it_did_not_keep(
    monkeypatch: pytest.MonkeyPatch, recompute: str, linears: int, cores: int
) -> None:
    calls = {"linear": 0, "core": 0}
    kept = set()
    linear, core = F.linear, F.scaled_dot_product_attention

    def counted_linear(*given: Tensor) -> Tensor:
        calls["linear"] += 1
        return linear(*given)

    def counted_core(*given: Tensor, is_causal: bool) -> Tensor:
        calls["core"] += 1
        return core(*given, is_causal=is_causal)

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    config = ModelConfig(layers=1, hidden=8, heads=2, sequence_length=5, vocab_size=7, padded_vocab_size=7)
    layer = TransformerLayer(config, TensorGroup(), config.stacks()[0], recompute, "layer", seed=0)
    entered = torch.randn(2, 5, 8, requires_grad=True)
    monkeypatch.setattr(F, "linear", counted_linear)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted_core)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        left = layer(entered)
    assert (kept == {entered.data_ptr()}) == (recompute == "full")
    left.sum().backward()
    assert calls == {"linear": linears, "core": cores}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("precision", "sharded", "each"),
    [("fp32", False, 16), ("fp32", True, 8 + 12 / 4), ("bf16", False, 18), ("bf16", True, 6 + 12 / 4)],
)
def test_a_sharded_optimizer_keeps_its_share_only(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, precision: str, sharded: bool, each: float
) -> None:
    """Bytes of each parameter, of 4 replicas: weight, gradient, fp32 copy and Adam's moments."""
    options = (f"train.precision={precision}", f"parallel.sharded_optimizer={sharded}")
    engine = first_rank(engine_run("parallel.data=4", "parallel.pipeline=1", *options).plan)
    monkeypatch.setattr(dist, "all_gather", lambda *given, **_: None)
    numel = engine.flat.weight.numel()
    engine.optimizer.load({kind: torch.zeros(numel) for kind in engine.optimizer.kinds}, 1)
    rule = engine.optimizer._rule
    tensors = [engine.flat.weight, engine.flat.grad, engine.flat.initial, rule._master, *rule._state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel() > 1}
    assert sum(storages.values()) / numel == pytest.approx(each, rel=1e-3)


def test_a_stage_lets_go_of_a_micro_batch_with_its_backward_pass(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 micro-batches 1F1B has 2 in the first of two stages at once, and 1 in the last."""
    forward = Stage.forward
    held: list[list[weakref.ref[Tensor]]] = []

    def watched(self: Stage, entered: Tensors) -> Tensors:
        held[:] = [refs for refs in held if any(ref() is not None for ref in refs)]
        assert len(held) <= (0 if self.last else 1)
        left = forward(self, entered)
        activations = [x for x in (*entered.values(), *left.values()) if x.requires_grad]
        held.append([weakref.ref(x) for x in activations])
        return left

    monkeypatch.setattr(Stage, "forward", watched)
    sizes = ("parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=1")
    run = engine_run(*sizes, "train.iterations=2")
    assert run.go() == 0, run.stderr()


def test_sequence_parallel_layers_are_given_their_share_of_the_sequence(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forward = TransformerLayer.forward

    def watched(self: TransformerLayer, x: Tensor) -> Tensor:
        (tmp_path / f"shape-{os.getpid()}").write_text(str(list(x.shape)))
        return forward(self, x)

    monkeypatch.setattr(TransformerLayer, "forward", watched)  # the ranks are forked from this process
    sizes = ("parallel.tensor=2", "parallel.data=1", "parallel.pipeline=1", "parallel.micro_batch_size=2")
    run = engine_run(*sizes, "parallel.sequence_parallel=true", "train.iterations=2")
    assert run.go() == 0, run.stderr()
    assert [path.read_text() for path in tmp_path.glob("shape-*")] == ["[2, 12, 32]"] * 2


@pytest.mark.usefixtures("alone")
def test_a_split_backward_pass_leaves_the_weights_of_all_layers_to_its_second_part(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    left = []
    run = WeightGradients.run

    def watched(self: WeightGradients, key: tuple[int, int]) -> None:
        left.append((key, len(self._waiting[key])))
        run(self, key)

    monkeypatch.setattr(WeightGradients, "run", watched)
    plan = engine_run(*ONE_STAGE, "parallel.schedule=zb_h1").plan
    samples = GptSamples(corpus, Split(8, 1, tuple(plan.data_split)), plan.model.sequence_length, VOCAB)
    first_rank(plan, samples).step(1)
    assert left == [((m, 0), 4 * plan.model.layers) for m in range(4)]


@pytest.mark.usefixtures("alone")
def test_on_a_cpu_the_gradients_of_large_weights_are_added_where_their_sum_lies(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    added: Counter[torch.Size] = Counter()
    add, rows = FlatWeights.add, FlatWeights.add_rows

    def watched(self: FlatWeights, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        added[parameter.shape] += 1
        (rows if left.dim() == 1 else add)(self, parameter, left, right)

    monkeypatch.setattr(FlatWeights, "add", watched)
    monkeypatch.setattr(FlatWeights, "add_rows", watched)
    plan = engine_run(*ONE_STAGE, "model.untie_embeddings_and_output_weights=true").plan
    model = plan.model
    samples = GptSamples(corpus, Split(8, 1, tuple(plan.data_split)), model.sequence_length, VOCAB)
    largest, micro_batches = 4 * model.hidden**2, 4

    def gradients(large: int) -> int:
        monkeypatch.setattr(flat, "LARGE", large)
        added.clear()
        first_rank(plan, samples).step(1)
        return added.total()

    assert gradients(largest + 1) == 0
    assert gradients(largest) == micro_batches * model.layers * 4
    assert gradients(1) == micro_batches * (model.layers * 4 + 2)
    assert added[torch.Size([model.padded_vocab_size, model.hidden])] == micro_batches * 2


def test_a_last_stage_leaves_its_heads_weight_too(engine_run: Callable[..., EngineRun]) -> None:
    sizes = ("parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.schedule=zb_h1")
    stage = stage_of(engine_run(*sizes).plan, 1, TensorGroup())
    later = WeightGradients(lambda *given: None)
    stage.defer_weight_grads(later)
    with later.defer(0):
        stage({"hidden.1": torch.randn(1, 24, 32, requires_grad=True)})["logits"].sum().backward()
    left = {name for name, weight in stage.parameters_by_name() if weight.grad is None}
    assert left == {name for name, weight in stage.parameters_by_name() if weight.dim() > 1}
    assert "head.word" in left


def test_gradients_are_summed_while_those_of_earlier_layers_are_still_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    flat = FlatWeights(
        [(str(number), layer.weight) for number, layer in enumerate(layers)],
        torch.float32,
        torch.device("cpu"),
        bucket_bytes=1,
    )
    told: list[str] = []

    class Sum:
        def wait(self) -> None:
            told.append("wait")

    def all_reduce(gradient: Tensor, group: object, async_op: bool) -> Sum:
        (name,) = [name for name, here in flat.slices.items() if gradient.data_ptr() == flat.grad[here].data_ptr()]
        told.append(f"sum {name}")
        return Sum()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    reducer = GradientReducer(flat, cast(dist.ProcessGroup, object()), Recorder(None), dict.fromkeys(flat.slices, 1))
    layers[0].weight.register_hook(lambda _: told.append("compute 0"))
    reducer.begin(2)
    for _ in range(2):
        nn.Sequential(*layers)(torch.ones(1, 4)).sum().backward()
    reducer.finish()
    assert told == ["compute 0", "sum 2", "sum 1", "compute 0", "sum 0", "wait", "wait", "wait"]
