"""Memory: the engine's own tensors, counted."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from conf.compose import compose
from conf.schema.experiment import Schedule
from fasop.costs.memory.activations import held_scores, layer_activations
from fasop.costs.memory.amounts import GIB, Amount, Spared, StageMemory
from fasop.costs.memory.shared_state import parameter_bytes
from fasop.costs.memory.stages import stage_memory
from fasop.costs.schedules import chunks_in_flight, in_flight
from fasop.costs.sizes import activation_bytes, embedding_parameters, head_parameters, layer_parameters
from fasop.costs.training import Training
from fasop.simulation.predict import predict
from launch.control.planning.plan import make_plan
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.parallel_config import BUCKET_BYTES, PIECE, SLOTS, Offload
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.iteration import schedule
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel import cross_entropy
from megatron_ext.parallel.cross_entropy import vocab_cross_entropy
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language import attention
from megatron_ext.tasks.language.transformer import TransformerLayer
from megatron_ext.tasks.linear import WeightGradients
from tests.support.fasop.plans import MEGATRON, training
from tests.support.fasop.random_pipelines import FLUSHING


@pytest.mark.parametrize(
    ("overrides", "plain", "sharded"),
    [
        ((), 16, 8 + 12 / 4),
        (("train.precision=bf16",), 18, 6 + 12 / 4),
        (("train.precision=bf16", "parallel.reduce_dtype=bf16"), 20, 8 + 12 / 4),
        ((*MEGATRON, "train.precision=fp32"), 16, 8 + 8 / 4),
        ((*MEGATRON, "train.precision=bf16"), 18, 6 + 12 / 4),
        (MEGATRON, 20, 4 + 16 / 4),
    ],
    ids=["fp32", "bf16", "bf16-sums", "megatron-fp32", "megatron-bf16", "megatron-fp16-as-the-measured-run"],
)
def test_a_parameter_takes_what_its_engine_keeps(overrides: tuple[str, ...], plain: float, sharded: float) -> None:
    assert parameter_bytes(training(*overrides)).all == plain
    assert parameter_bytes(training(*overrides, sharded_optimizer=True)).all == sharded


@pytest.mark.parametrize(
    ("words", "each", "width"), [((), 16 / 4, 4), (("train.precision=bf16",), 18 / 4, 2)], ids=["fp32", "bf16"]
)
def test_of_weights_that_are_gathered_a_share_is_kept_and_two_layers(
    words: tuple[str, ...], each: float, width: int
) -> None:
    sharded = training(*words, sharded_optimizer=True)
    scattered, gathered = (replace(sharded, parallel=replace(sharded.parallel, zero=zero)) for zero in (2, 3))
    assert parameter_bytes(gathered).all == each
    beside = stage_memory(gathered, 1).buffers.fixed - stage_memory(scattered, 1).buffers.fixed
    assert beside == pytest.approx(2 * width * layer_parameters(gathered.model, 1), rel=1e-3)


@pytest.mark.parametrize(
    ("words", "each"), [((), 4 + 16 / 4), (("train.precision=bf16",), 2 + 16 / 4)], ids=["fp32", "bf16"]
)
def test_of_gradients_that_are_scattered_a_share_is_kept_and_a_few_buckets(words: tuple[str, ...], each: float) -> None:
    sharded = training(*words, sharded_optimizer=True)
    scattered = replace(sharded, parallel=replace(sharded.parallel, zero=2))
    assert parameter_bytes(scattered).all == each
    assert parameter_bytes(replace(scattered, parallel=replace(scattered.parallel, data=1))).gradient == 4
    first, middle = (stage_memory(scattered, s).buffers.fixed - stage_memory(sharded, s).buffers.fixed for s in (0, 1))
    layer = 4 * layer_parameters(scattered.model, 1)
    assert middle == pytest.approx(max(layer, 3 * BUCKET_BYTES), rel=1e-3)
    assert first - middle == 4 * scattered.model.padded_vocab(1) * scattered.model.hidden, "the words wait for the last"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("train.optimizer=adam",), 2),
        (("train.optimizer=lamb",), 2),
        (("train.optimizer=sgd",), 1),
        (("train.optimizer=sgd", "train.momentum=0"), 0),
        (("train.optimizer=sgd", "train.ema=0.9"), 2),
        (("train.ema=0.9",), 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_the_optimizer_keeps_counts(words: tuple[str, ...], kept: int) -> None:
    """In fp32 beside weight and gradient; master weights where the weights have 16 bits, or are shared out."""
    one = Training.of(compose([*words, "train.precision=fp32"]))
    assert parameter_bytes(one).all == 8 + 4 * kept
    half = Training.of(compose([*words, "train.precision=bf16"]))
    assert parameter_bytes(half).all == 6 + 4 + 4 * kept
    shared = replace(one, parallel=replace(one.parallel, sharded_optimizer=True))
    assert parameter_bytes(shared).all == 8 + (4 + 4 * kept) / one.parallel.data


@pytest.mark.parametrize(
    ("words", "sharded", "values"),
    [
        (("train.precision=bf16",), False, 3),
        (("train.precision=fp32",), False, 2),
        (("train.precision=fp32",), True, 3),
        (("train.precision=bf16", "train.ema=0.9", "train.optimizer=sgd"), True, 3),
    ],
    ids=["bf16", "fp32", "fp32-sharded", "sgd-with-average"],
)
def test_what_is_offloaded_leaves_the_gpu_but_for_pieces(words: tuple[str, ...], sharded: bool, values: int) -> None:
    one = training(*words, sharded_optimizer=sharded)
    away = replace(one, parallel=replace(one.parallel, offload=Offload.optimizer))
    here, there = stage_memory(one, 0), stage_memory(away, 0)
    assert here.optimizer.layer > 0
    assert (there.optimizer.layer, there.optimizer.fixed) == (0.0, 0.0)
    assert there.buffers.fixed - here.buffers.fixed == SLOTS * PIECE * 4 * values
    assert (there.weights, there.gradients) == (here.weights, here.gradients)


def test_of_offloaded_activations_two_layers_stay_whatever_waits() -> None:
    one = training("train.precision=bf16")
    away = replace(one, parallel=replace(one.parallel, offload=Offload.activations))
    for micro_batches in (1.0, 4.0):
        here, there = (stage_memory(case, 0, micro_batches).activations for case in (one, away))
        of_layer = here.layer / micro_batches
        assert there.layer == 0.0
        assert 2 * of_layer < there.fixed - here.fixed < 3 * of_layer


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_parameters_are_those_of_the_engine(tmp_path: Path, tensor: int) -> None:
    sizes = (f"parallel.tensor={tensor}", "parallel.data=1", "parallel.pipeline=2")
    one = compose(["model=tiny", *sizes, "parallel.global_batch_size=2", "parallel.partition=1-3"])
    (tmp_path / "plan.json").write_text(json.dumps(make_plan(one, "a/b").as_json()))
    plan = Plan.read(tmp_path / "plan.json")
    counts = [
        sum(p.numel() for _, p in stage_of(plan, s, TensorGroup(tensor, 0, None, False)).parameters_by_name())
        for s in range(2)
    ]
    layer = layer_parameters(one.model, tensor)
    first, last = embedding_parameters(one.model, tensor), head_parameters(one.model, tensor, own_word=True)
    assert counts == [first + layer, last + 3 * layer]


LLAMA = ("model.normalization=RMSNorm", "model.position_embedding_type=rope", "model.swiglu=true")


@pytest.mark.parametrize(
    ("options", "recompute"),
    [
        ((), "none"),
        ((), "selective"),
        ((*LLAMA, "model.add_bias_linear=false"), "none"),
        ((*LLAMA, "model.num_query_groups=2", "model.ffn_hidden=344"), "none"),
        (("model.num_query_groups=1",), "none"),
        (("model.position_embedding_type=rope", "model.ffn_hidden=200"), "none"),
        (("model.hidden_dropout=0.1", "model.attention_dropout=0.1"), "none"),
    ],
    ids=["gpt", "selective", "llama", "grouped-llama", "one-group", "rotary", "dropout"],
)
def test_activations_are_what_a_layer_keeps_for_its_backward_pass(options: tuple[str, ...], recompute: str) -> None:
    """The tensors that autograd saves, each storage once, without the weights."""
    one = training(
        "model.hidden=128",
        "model.heads=4",
        "model.sequence_length=96",
        f"parallel.recompute={recompute}",
        *options,
        micro_batch_size=4,
    )
    layer = layer_of(one.model.sized(1), recompute)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(4, 96, 128, requires_grad=True), torch.arange(4))
    kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert layer_activations(one) == pytest.approx(kept, rel=0.02)  # besides: the norms' means, the attention's sums


ONE_CHUNK = [*(one for one in FLUSHING if one is not Schedule.interleaved), Schedule.model_parallel]


@given(st.sampled_from(ONE_CHUNK), st.integers(2, 8), st.integers(1, 20))
def test_micro_batches_in_flight_are_those_of_the_schedule(name: Schedule, stages: int, micro_batches: int) -> None:
    for stage, actions in enumerate(schedule(str(name), stages, 1, micro_batches)):
        steps = [
            {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0) for action in actions
        ]
        most = max(itertools.accumulate(steps))
        bound = in_flight(name, stage, stages, micro_batches)
        exact = name is not Schedule.zb_h1
        assert most == bound if exact else most <= bound


@given(st.integers(2, 8), st.integers(1, 24), st.lists(st.integers(0, 9), min_size=2, max_size=4))
def test_chunks_of_any_layers_hold_at_most_what_they_hold_in_the_schedule(
    stages: int, micro_batches: int, layers: list[int]
) -> None:
    moments = chunks_in_flight(Schedule.interleaved, stages, micro_batches, len(layers))
    for stage, actions in enumerate(schedule("interleaved", stages, len(layers), micro_batches)):
        steps = [{Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0) * layers[action.chunk] for action in actions]
        assert max(itertools.accumulate(steps)) == (moments[..., stage] @ layers).max()


def test_later_stages_hold_fewer_micro_batches() -> None:
    """Not as many as there are stages on each of them."""
    layer = [stage_memory(training(), stage).layer for stage in range(8)]
    assert [(layer[0] - layer[s]) / layer_activations(training()) for s in range(8)] == pytest.approx(list(range(8)))


@pytest.mark.parametrize("engine", [(), MEGATRON], ids=["tdpp", "megatron"])
def test_recomputation_trades_memory(engine: tuple[str, ...]) -> None:
    none, some, full = (
        stage_memory(training(*engine, f"parallel.recompute={what}"), 1).of(8) for what in ("none", "selective", "full")
    )
    assert full < some <= none


@given(st.floats(1e6, 1e9), st.floats(0, 5e9), st.floats(0.1, 80))
def test_the_capacity_is_the_most_that_fits(layer: float, fixed: float, gib: float) -> None:
    none = Amount(layer=0.0, fixed=0.0)
    stage = StageMemory(
        weights=Amount(layer=layer, fixed=0.0),
        gradients=none,
        optimizer=none,
        activations=none,
        buffers=none,
        fragments=Amount(layer=0.0, fixed=fixed),
    )
    most = stage.capacity(gib)
    assert stage.of(most + 1) > gib * GIB * (1 - 1e-12)
    assert most < 0 or stage.of(most) <= gib * GIB * (1 + 1e-12)


@pytest.mark.parametrize("gib", [0.5, 1.01, 1.25, 2, 4])
def test_layers_that_take_nothing_at_the_fullest_moment_fit_until_another_moment_is_fuller(gib: float) -> None:
    """Their weights are shared out, and what the only micro-batch kept of them is gone by then."""
    none = Amount(layer=0.0, fixed=0.0)
    kept = Amount(layer=GIB / 4, fixed=0.0, spared=Spared(most=3, layer=GIB / 4, beyond=GIB / 8))
    fragments = Amount(layer=0.0, fixed=1.0 * GIB)
    stage = StageMemory(
        weights=none, gradients=none, optimizer=none, activations=kept, buffers=none, fragments=fragments
    )
    most = int(stage.capacity(gib))
    assert stage.of(most + 1) > gib * GIB
    assert stage.of(most) <= gib * GIB if gib >= 1 else most < 0


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in it: those that are there `now`, and the `most`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given | self._known:
                storage = one.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                self.most = max(self.most, self.now)
        return made

    def _gone(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.now -= size


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_dropping_weights_of_attention_takes_what_scores_take(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most that torch allocates in one layer, beyond what it does without."""
    monkeypatch.setattr(attention, "PLAIN_TOKENS", 0)  # a CPU alone keeps the scores of short sequences of 16 bits
    sizes = ("model.hidden=32", "model.heads=8", "model.sequence_length=384", f"train.precision={precision}")
    peaks, predicted = [], []
    for rate in (0.0, 0.1):
        one = training(*sizes, f"model.attention_dropout={rate}", micro_batch_size=1)
        layer = layer_of(one.model.sized(1), "none").to(dtype)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(1, 384, 32, dtype=dtype, requires_grad=True)

        with Live() as live:
            layer(x, torch.arange(1)).sum().backward()
        peaks.append(live.most)
        predicted.append(held_scores(one, triton=False))
    assert predicted[1] - predicted[0] == pytest.approx(peaks[1] - peaks[0], rel=0.15)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("alone")
def test_the_last_stage_has_room_for_all_that_torch_holds_of_logits(
    precision: str, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what a CPU has besides, here of a token at a time: logits and gradient in fp32, and one in 16 bits."""
    monkeypatch.setattr(cross_entropy, "PART", 1)

    def held(vocabulary: int) -> int:
        hidden = torch.randn(2, 64, 16, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
        word = torch.zeros(vocabulary // tensor, 16, dtype=hidden.dtype)
        with Live() as live:
            left = functional.linear(hidden.requires_grad_(), word)
            left = vocab_cross_entropy(left, torch.zeros(2, 64, dtype=torch.long), vocabulary, TensorGroup(tensor))
            left.backward()  # type: ignore[no-untyped-call]
        return live.most

    def foreseen(vocabulary: int) -> float:
        one = training(
            *(f"train.precision={precision}", "model.sequence_length=64", f"model.vocab_size={vocabulary}"),
            tensor=tensor,
            micro_batch_size=2,
        )
        last = stage_memory(one, one.parallel.pipeline - 1)
        return last.activations.fixed

    most, room = (of(20480) - of(10240) for of in (held, foreseen))
    assert most <= room + (4 + 4 + 4) * 10240 / tensor
    assert room <= most * 1.1


SMALL = (
    "model=small model.layers=12 model.hidden=768 model.heads=12 model.sequence_length=1024 model.vocab_size=50257 "
    "model.vocab_multiple=128"
)
LLAMA_1B = "model=llama-1b model.layers=4"


@pytest.mark.parametrize(
    ("words", "allocated_mib"),
    [
        (f"{SMALL} parallel=single parallel.micro_batch_size=1", [2625.4]),
        (f"{SMALL} parallel=single parallel.micro_batch_size=8", [5359.8]),
        (f"{SMALL} parallel=single parallel.micro_batch_size=4 train.precision=fp32", [5192.7]),
        (f"{SMALL} parallel=single parallel.micro_batch_size=4 parallel.recompute=full", [2711.7]),
        (f"{LLAMA_1B} parallel=single parallel.micro_batch_size=1", [11521.7]),
        (f"{LLAMA_1B} parallel=single parallel.micro_batch_size=2", [13837.9]),
        (
            f"{SMALL} parallel.data=2 parallel.pipeline=1 parallel.partition=12 parallel.sharded_optimizer=true "
            "parallel.micro_batch_size=4",
            [3083.6],
        ),
        (
            f"{SMALL} parallel.data=1 parallel.pipeline=2 parallel.partition=6-6 parallel.micro_batch_size=4",
            [2698, 2424],
        ),
        (
            f"{SMALL} parallel.data=1 parallel.pipeline=2 parallel.partition=6-6 parallel.micro_batch_size=4 "
            "parallel.schedule=zb_h1",
            [2710, 3503],
        ),
        (
            f"{SMALL} parallel.data=1 parallel.pipeline=4 parallel.partition=3-3-3-3 parallel.micro_batch_size=4",
            [2335.5, 1399.3, 1092.5, 1769.5],
        ),
    ],
    ids=["124M-1", "124M-8", "fp32", "again", "llama-1", "llama-2", "sharded", "two-stages", "zb-h1", "four-stages"],
)
def test_predicted_memory_is_what_torchs_allocator_gave_on_gpus(words: str, allocated_mib: list[float]) -> None:
    """The peak after three iterations under the stand-in of tests/support/cuda, torch 2.14 with Triton, recorded."""
    given = words.split()
    batch = 8 * int(next(word for word in given if "micro_batch_size" in word).partition("=")[2])
    precision = [] if "train.precision=fp32" in given else ["train.precision=bf16"]
    length = ["train.iterations=3", "train.lr_warmup_iterations=1"]
    experiment = compose([*given, *precision, f"parallel.global_batch_size={batch}", *length])
    stages = predict(experiment).stages
    assert len(stages) == len(allocated_mib)
    for stage, mib in zip(stages, allocated_mib, strict=True):
        known = stage.memory.by_term()
        allowance = sum(known[name].fixed for name in ("fragments", "communicators", "context"))
        predicted = stage.memory.of(sum(stage.layers)) - allowance
        assert predicted / 2**20 == pytest.approx(mib, rel=0.01)


def test_zb_h1_keeps_what_it_computes_again_until_the_weights_have_their_gradients() -> None:
    small = ("model.hidden=128", "model.heads=4", "model.sequence_length=96")
    one = training("parallel.schedule=zb_h1", "parallel.recompute=full", *small)
    config = ModelConfig(layers=1, hidden=128, heads=4, sequence_length=96, vocab_size=1, padded_vocab_size=1)
    layer = layer_of(config, "full")
    layer.later = WeightGradients(lambda weight, left, right: None)
    entered = torch.randn(1, 96, 128, requires_grad=True)
    with Live() as live:
        with layer.later.defer(0):
            torch.autograd.backward([layer(entered)], [torch.ones(1, 96, 128)])
        before = live.now
        layer.later.run(0)
        waited = before - live.now
    message = activation_bytes(one.model, 1, one.precision)
    for stage, actions in enumerate(schedule("zb_h1", 4, 1, 8)):
        steps = [{Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0) for action in actions]
        cut = replace(one, parallel=replace(one.parallel, data=8, pipeline=4))
        assert cut.parallel.micro_batches == 8
        kept = stage_memory(cut, stage).activations.layer
        assert kept == pytest.approx(max(itertools.accumulate(steps)) * waited + 4 * message, rel=0.02)


def test_of_several_chunks_only_one_micro_batch_is_in_the_head() -> None:
    for stages, chunks, micro_batches in ((2, 2, 1), (4, 2, 8), (3, 3, 7)):
        last = schedule("interleaved", stages, chunks, micro_batches)[-1]
        of_head = [action.kind for action in last if action.chunk == chunks - 1]
        steps = [{Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(kind, 0) for kind in of_head]
        assert max(itertools.accumulate(steps)) == 1
    plain = training("model.layers=48", pipeline=8)
    chunked = replace(plain, parallel=replace(plain.parallel, schedule=Schedule.interleaved, chunks=2))
    assert stage_memory(chunked, 7, 1.0).activations.fixed == stage_memory(plain, 7).activations.fixed


def layer_of(config: ModelConfig, recompute: str) -> TransformerLayer:
    return TransformerLayer(config, TensorGroup(1, 0, None, False), config.stacks()[0], recompute, "layer", seed=0)
