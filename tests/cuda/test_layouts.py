"""Every kind of run comes to its end on GPUs, waits for them only to know loss and norm, and sends what it counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.contract.models.counts import parameter_count
from tests.megatron_ext.engine import test_images_agree as images
from tests.megatron_ext.engine import test_translation_agrees as translation
from tests.megatron_ext.tasks.user.test_module import module_run
from tests.support.cuda.machine import DEFAULT, Counts, Machine, Message, counts
from tests.support.megatron_ext.engine_run import EngineRun, make_corpus, make_run
from tests.support.megatron_ext.images import make_images
from tests.support.megatron_ext.pairs import write_pairs

GPU = "cluster.gpus.cpu.name=GPU"
ONE, TWO = "parallel.data=1 parallel.pipeline=1 parallel.partition=3", "parallel.pipeline=2 parallel.partition=1-2"
TENSOR = "parallel.tensor=2 parallel.sequence_parallel=true"
REPLICAS = "parallel.data=2 parallel.pipeline=1 parallel.partition=3"
LAYOUTS: dict[str, tuple[int, str]] = {
    "single": (1, ONE),
    "fp16": (1, f"{ONE} train.precision=fp16"),
    "bf16": (1, f"{ONE} train.precision=bf16"),
    "compiled": (1, f"{ONE} train.compile=true train.precision=bf16"),
    "recomputed": (1, f"{ONE} parallel.recompute=full"),
    "streams": (1, f"{ONE} parallel.streams=2"),
    "streams-bf16": (1, f"{ONE} parallel.streams=2 train.precision=bf16"),
    "saved-meanwhile": (1, f"{ONE} train.save_interval=2 train.save_async=true"),
    "evaluated": (1, f"{ONE} train.eval_interval=2 train.eval_iterations=1"),
    "data": (2, REPLICAS),
    "shares": (2, f"{REPLICAS} parallel.shares=3-1"),
    "sharded": (
        2,
        f"{REPLICAS} parallel.sharded_optimizer=true train.precision=bf16",
    ),
    "offloaded": (1, f"{ONE} parallel.offload=optimizer train.precision=bf16"),
    "offloaded-in-fp32": (1, f"{ONE} parallel.offload=optimizer"),
    "sharded-offloaded": (
        2,
        f"{REPLICAS} parallel.sharded_optimizer=true parallel.offload=optimizer train.precision=bf16 train.ema=0.9",
    ),
    "activations-offloaded": (2, f"parallel.data=1 {TWO} parallel.offload=activations train.precision=bf16"),
    "activations-offloaded-zb-h1": (2, f"parallel.data=1 {TWO} parallel.offload=both parallel.schedule=zb_h1"),
    "tensor": (2, f"parallel.data=1 parallel.pipeline=1 parallel.partition=3 {TENSOR}"),
    "data-in-bf16": (2, f"{REPLICAS} parallel.reduce_dtype=bf16"),
    "sharded-in-bf16": (
        2,
        f"{REPLICAS} parallel.sharded_optimizer=true parallel.reduce_dtype=bf16 train.precision=bf16",
    ),
    "1f1b": (2, f"parallel.data=1 {TWO}"),
    "interleaved": (
        2,
        "parallel.data=1 parallel.pipeline=2 parallel.chunks=2 parallel.partition=1-1-0-1 "
        "parallel.schedule=interleaved",
    ),
    "zb-h1": (2, f"parallel.data=1 {TWO} parallel.schedule=zb_h1"),
    "pipedream": (
        2,
        f"parallel.data=1 {TWO} parallel.schedule=pipedream model.untie_embeddings_and_output_weights=true",
    ),
    "1f1b-in-int8": (2, f"parallel.data=1 {TWO} parallel.compress=int8"),
    "scattered": (2, f"{REPLICAS} parallel.zero=2 train.precision=bf16"),
    "scattered-zb-h1": (4, f"parallel.data=2 {TWO} parallel.zero=2 parallel.schedule=zb_h1 parallel.offload=both"),
    "gathered": (2, f"{REPLICAS} parallel.zero=3 train.precision=bf16"),
    "gathered-recomputed": (2, f"{REPLICAS} parallel.zero=3 parallel.recompute=full:2"),
    "gathered-1f1b": (4, f"parallel.data=2 {TWO} parallel.zero=3-1 parallel.offload=both-optimizer"),
    "islands": (4, f"parallel.data=2 {TWO} train.sync_every=1"),
    "islands-of-unlike-sizes": (
        3,
        "parallel.data=3 parallel.pipeline=1 parallel.partition=3 parallel.islands=2-1 train.sync_every=1 "
        "parallel.shares=2-1-1 train.precision=bf16",
    ),
    "islands-of-plans-of-their-own": (
        4,
        "parallel.data=2 parallel.islands=1-1 parallel.pipeline=2 parallel.partition=1-2/3 parallel.tensor=1/2 "
        "train.sync_every=1 parallel.shares=1-3 train.precision=bf16",
    ),
    "tensor-1f1b": (4, f"parallel.data=1 {TWO} {TENSOR} parallel.recompute=selective"),
    "sharded-of-four": (
        4,
        "parallel.data=4 parallel.pipeline=1 parallel.partition=3 parallel.sharded_optimizer=true train.precision=bf16",
    ),
    "sharded-zb-h1": (
        4,
        f"parallel.data=2 {TWO} parallel.schedule=zb_h1 parallel.sharded_optimizer=true train.precision=bf16 "
        "parallel.recompute=full train.save_async=true train.save_interval=2",
    ),
    "replicas-3-1": (4, f"parallel.data=1 {TWO} parallel.replicas=3-1 parallel.global_batch_size=12"),
    "1f1b-of-four": (4, "parallel.data=1 parallel.pipeline=4 parallel.partition=1-1-1-0"),
}
SMALL = 64
"""Bytes of messages that tell a loss, a norm or a weight of the batch: they are not counted as traffic."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def trained(tmp_path: Path) -> Callable[[EngineRun, int], list[Path]]:
    """Trains on so many GPUs; the logs of its ranks, in their order."""

    def train(run: EngineRun, gpus: int) -> list[Path]:
        assert run.plan.device == "cuda"
        assert run.plan.world_size == gpus
        machine = Machine(gpus, tmp_path / "machine")
        machine.train(run.run.plan, len(run.plan.nodes))
        assert len(run.metrics()) == run.plan.train.iterations
        logs = machine.logs()
        assert len(logs) == gpus
        started = sorted(run.plan.ranks, key=lambda place: (place.node, place.local_rank))
        return [log for _, log in sorted(zip((place.rank for place in started), logs, strict=True))]

    return train


def volume(message: Message) -> float:
    """Bytes that a rank sends, in a ring where all take part."""
    others = message.ranks - 1
    if message.call == "recv" or (message.call == "broadcast" and message.rank != message.peer):
        return 0
    if message.call == "all_reduce":
        return 2 * others * message.bytes / message.ranks
    return message.bytes if message.call == "send" else others * message.bytes


def assert_steady(run: EngineRun, logs: list[Path]) -> list[Counts]:
    """The third iteration of all ranks, which the fourth one repeats."""
    plan, found = run.plan, []
    for rank, log in enumerate(logs):
        third, fourth = counts(log, 3), counts(log, 4)
        place = plan.ranks[rank]
        most = 3 if place.stage == plan.of_island(place).pipeline - 1 else 1
        assert sum(third.waits.values()) <= most, (rank, third.waits)
        assert sum(third.kernels.values()) > 0
        assert third.kernels == fourth.kernels
        assert not third.unmade, third.unmade
        found.append(third)
    return found


def assert_apart(rank: Counts, copies: bool) -> None:
    """Its kernels run on the default stream or, of a copy, on its own; these two wait once for each other."""
    other = {*rank.streams} - {DEFAULT}
    assert len(other) == int(copies)
    assert all(rank.priorities[stream] == 0 for stream in other), "a copy is to have no more of the GPU than another"
    between = [wait for wait in rank.stream_waits if wait[0] != wait[1] and {*wait} <= {DEFAULT, *other}]
    assert sorted(between) == sorted(pair for own in other for pair in ((own, DEFAULT), (DEFAULT, own)))


OFFLOADED = {
    "offloaded": (3, 1),
    "offloaded-in-fp32": (2, 1),
    "sharded-offloaded": (4, 2),
}
"""Of layouts how many numbers in fp32 the host keeps of each parameter, moments, weights and average, and by how many
ranks these are shared."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_on_gpus(
    layout: str, tmp_path: Path, corpus: Path, trained: Callable[[EngineRun, int], list[Path]]
) -> None:
    """What is offloaded comes and goes on streams of its own."""
    gpus, words = LAYOUTS[layout]
    run = make_run(tmp_path / "run", corpus, GPU, "parallel.micro_batch_size=1", *words.split())
    plan = run.plan
    logs = trained(run, gpus)
    if plan.stream is None:
        third = assert_steady(run, logs)
        assert all(one.stream == DEFAULT or rank.priorities[one.stream] < 0 for rank in third for one in rank.messages)
        if "reduce_dtype=bf16" in words:  # whose sums have steps on a stream of their own
            (between,) = {*third[0].streams} - {DEFAULT}
            assert third[0].priorities[between] < 0
        else:
            assert_apart(third[0], copies="streams" in words)
        if layout in OFFLOADED:
            numbers, shares = OFFLOADED[layout]
            expected = 4 * numbers * parameter_count(plan.model) / shares
            assert all(+rank.copied == {"host-gpu": expected, "gpu-host": expected} for rank in third)
    assert_counted(run, logs)


def assert_counted(run: EngineRun, logs: list[Path]) -> None:
    """What a rank says that it has sent is what it has given NCCL."""
    for rank, log in enumerate(logs):
        told = json.loads((run.run.path / "traffic" / f"rank-{rank:05d}.json").read_text())["bytes"]
        iterations = [counts(log, iteration) for iteration in range(1, run.plan.train.iterations + 1)]
        every = [one for each in iterations for one in each.messages]
        sent = sum(volume(one) for one in every if one.bytes > SMALL or one.call != "all_reduce")
        assert sent == sum(told.values()), (rank, told, Counter(one.call for one in iterations[2].messages))


BY_NODE: dict[str, tuple[str, dict[str, tuple[float, ...]]]] = {
    "whole": ("", {"reduce_scatter": (2,), "all_reduce": (2,), "all_gather": (2,)}),
    "whole-in-bf16": (
        "parallel.reduce_dtype=bf16",
        {"all_to_all": (1, 0.5), "reduce_scatter": (), "all_reduce": (), "all_gather": (0.5, 1)},
    ),
    "sharded": (
        "parallel.sharded_optimizer=true train.precision=bf16",
        {"reduce_scatter": (2, 1), "all_reduce": (), "all_gather": (0.5, 1)},
    ),
    "sharded-in-bf16": (
        "parallel.sharded_optimizer=true parallel.reduce_dtype=bf16 train.precision=bf16",
        {"all_to_all": (1, 0.5), "reduce_scatter": (), "all_reduce": (), "all_gather": (0.5, 1)},
    ),
}
"""Of options, the bytes a parameter of each call's messages: of an all-gather or reduce-scatter what one rank gives or
gets."""


@pytest.mark.parametrize(("words", "messages"), BY_NODE.values(), ids=BY_NODE)
def test_two_nodes_of_two_gpus_sum_within_each_first(
    words: str,
    messages: dict[str, tuple[float, ...]],
    tmp_path: Path,
    corpus: Path,
    trained: Callable[[EngineRun, int], list[Path]],
) -> None:
    """What changes the format between the steps runs on a stream of its own."""
    of_four = "parallel.data=4 parallel.pipeline=1 parallel.partition=3 parallel.micro_batch_size=1"
    run = make_run(tmp_path / "run", corpus, GPU, *of_four.split(), *words.split()).on_nodes((0, 0, 1, 1), [0])
    logs = trained(run, 4)
    size = parameter_count(run.plan.model)
    for rank in assert_steady(run, logs):
        large = [one for one in rank.messages if one.bytes > SMALL]
        assert {one.ranks for one in large} == {2}
        assert all(one.stream == DEFAULT or rank.priorities[one.stream] < 0 for one in large)
        between = {*rank.streams} - {DEFAULT}
        assert len(between) == ("reduce_dtype=bf16" in words)
        assert all(rank.priorities[stream] < 0 for stream in between)
        for call, widths in messages.items():
            assert [one.bytes / size for one in large if one.call == call] == [*widths]
    assert_counted(run, logs)


TASKS: dict[str, tuple[int, Callable[[Path], EngineRun]]] = {
    "transformer": (1, lambda folder: _translated(folder, "transformer", "1")),
    "gnmt": (1, lambda folder: _translated(folder, "gnmt", "1")),
    "gnmt-1f1b": (2, lambda folder: _translated(folder, "gnmt", "2")),
    "vit": (1, lambda folder: _seen(folder, "vit")),
    "resnet": (1, lambda folder: _seen(folder, "resnet")),
    "resnet-data": (2, lambda folder: _seen(folder, "resnet", "parallel.data=2")),
    "module": (1, lambda folder: module_run(folder / "run", "Residual", GPU)),
    "module-1f1b": (2, lambda folder: module_run(folder / "run", "Residual", GPU, "parallel.pipeline=2")),
}


def _translated(folder: Path, model: str, stages: str) -> EngineRun:
    words = (f"parallel.pipeline={stages}", "parallel.data=1", "parallel.micro_batch_size=2")
    return make_run(folder / "run", write_pairs(folder, 61), GPU, *translation.MODELS[model], *words)


def test_images_that_helpers_prepare_come_from_pinned_memory(
    tmp_path: Path, trained: Callable[[EngineRun, int], list[Path]]
) -> None:
    """Of 64 x 64 pixels a micro-batch is large enough for them; they use no GPU, and so have no log."""
    words = (*images.MODELS["resnet"], "model.image_size=64", "parallel.micro_batch_size=4")
    run = make_run(tmp_path / "run", make_images(tmp_path, 64), GPU, *words, base=("parallel=single", *images.BASE))
    logs = trained(run, 1)
    (found,) = assert_steady(run, logs)
    assert found.pageable == 0
    assert found.copies["host-gpu"] >= 3


def _seen(folder: Path, model: str, *words: str) -> EngineRun:
    prefix = make_images(folder, images.SIZES.get(model, 8))
    base = ("parallel=single", "parallel.micro_batch_size=2", *images.BASE)
    return make_run(folder / "run", prefix, GPU, *images.MODELS[model], *words, base=base)


@pytest.mark.parametrize(("gpus", "made"), TASKS.values(), ids=TASKS)
def test_a_task_trains_on_gpus(
    gpus: int, made: Callable[[Path], EngineRun], tmp_path: Path, trained: Callable[[EngineRun, int], list[Path]]
) -> None:
    run = made(tmp_path)
    assert_steady(run, trained(run, gpus))


OPTIONS: dict[str, tuple[int, str]] = {
    "fp16-logmax": (1, f"{ONE} train.precision=fp16 train.loss_scaler=logmax train.ema=0.9 profile.timeline=false"),
    "unclipped-sgd": (1, f"{ONE} train.clip_grad=0 train.optimizer=sgd model.hidden_dropout=0.1"),
    "lamb": (1, f"{ONE} train.optimizer=lamb train.precision=bf16"),
    "llama-compiled": (
        1,
        f"{ONE} model.position_embedding_type=rope model.normalization=RMSNorm "
        "model.swiglu=true train.compile=true train.precision=bf16",
    ),
    "compiled-dropout": (
        2,
        f"parallel.data=1 {TWO} model.hidden_dropout=0.1 model.attention_dropout=0.1 train.compile=true "
        "train.precision=fp16 train.loss_scaler=logmax train.eval_interval=2 train.eval_iterations=1",
    ),
    "overlapped": (
        2,
        f"{REPLICAS} train.clip_grad=0 train.ema=0.9 profile.timeline=false",
    ),
    "tensor-logmax": (2, f"{ONE} {TENSOR} train.precision=fp16 train.loss_scaler=logmax model.hidden_dropout=0.1"),
    "sharded-1f1b": (
        4,
        f"parallel.data=2 {TWO} parallel.sharded_optimizer=true train.precision=fp16 train.loss_scaler=logmax "
        "train.ema=0.9 model.hidden_dropout=0.1 model.attention_dropout=0.1 parallel.recompute=full train.compile=true",
    ),
    "replicas-3-1-logmax": (
        4,
        f"parallel.data=1 {TWO} parallel.replicas=3-1 parallel.global_batch_size=12 train.precision=fp16 "
        "train.loss_scaler=logmax profile.timeline=false",
    ),
}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_no_option_makes_the_host_wait_longer(
    option: tuple[int, str], tmp_path: Path, corpus: Path, trained: Callable[[EngineRun, int], list[Path]]
) -> None:
    gpus, words = option
    run = make_run(tmp_path / "run", corpus, GPU, "parallel.micro_batch_size=1", *words.split())
    assert_steady(run, trained(run, gpus))


LLAMA = "model.position_embedding_type=rope model.normalization=RMSNorm model.swiglu=true"


@pytest.mark.parametrize("model", ["", LLAMA], ids=["gpt", "llama"])
def test_layers_of_one_kind_are_compiled_to_one_graph_with_dropout_too(
    model: str, tmp_path: Path, corpus: Path, trained: Callable[[EngineRun, int], list[Path]]
) -> None:
    dropped = "model.layers=10 parallel.partition=10 model.hidden_dropout=0.1 model.attention_dropout=0.1"
    words = f"{ONE} {dropped} {model} train.compile=true train.precision=bf16 parallel.micro_batch_size=1"
    run = make_run(tmp_path / "run", corpus, GPU, *words.split())
    (log,) = trained(run, 1)
    with log.open(errors="replace") as lines:
        graphs = Counter(line.split()[-1] for line in lines if line.startswith("# graph "))
    assert graphs["GptLayer"] == 1
