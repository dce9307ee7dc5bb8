"""`pipedream=FILE`: configurations of PipeDream's driver, trained as they are."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from conf.compose import command_line, compose
from conf.errors import ConfigError
from conf.pipedream import export, placement
from conf.pipedream.driver import Driver
from conf.schema.experiment import Experiment
from tests.support import ROOT
from tests.support.cases import drawn
from tests.support.pipedream import write_driver, write_package

HOSTS = {4: ["v401"], 12: ["v401", "v402", "v404"], 16: ["v401", "v402", "v404", "v407"]}
VGG_4, VGG_16, ALEXNET = ("3" * 7, "3" * 6 + "LLL"), ("3" * 13, "LLL"), ("b5333", "LLL")
RESNET_16 = ("713111311311131131131", "1311311131131131", "1311311311131131L")
GNMT_4 = ("EBR", "RERA", "RR", "RK")
GNMT_12 = ("E", "B", "R", "R", "R", "EA", "R", "R", "R", "K")
LARGE_4, LARGE_16 = ("EBRRRR", "ERRRAR", "RRRR", "RRK"), ("EB", "R", "RR", "RR", "RR", "EA", *"RRRRRRR", "K")


class Shipped(NamedTuple):
    """What the public repository's file says, and what it is here."""

    name: str
    module: str
    ranks: list[list[int]]
    gpus: int
    batch: int
    rate: float
    epochs: int
    package: tuple[str, ...]
    partition: str
    depth: str | None = None


def each(count: int) -> list[list[int]]:
    return [[rank] for rank in range(count)]


def first(count: int, last: int = 1) -> list[list[int]]:
    return [list(range(count)), list(range(count, count + last))]


FILES = [
    Shipped("vgg16_4dp", "vgg16.gpus=4", [[*range(4)]], 4, 64, 0.01, 60, VGG_4, "16"),
    Shipped("vgg16_4pipedream", "vgg16.gpus=4", first(3), 4, 64, 0.01, 60, VGG_4, "7-9", "1-0"),
    Shipped("vgg16_16dp", "vgg16.gpus=16", [[*range(16)]], 16, 64, 0.04, 60, VGG_16, "16"),
    Shipped("vgg16_16pipedream", "vgg16.gpus=16", first(15), 16, 64, 0.04, 60, VGG_16, "13-3", "1-0"),
    Shipped("alexnet_4dp", "alexnet.gpus=4", [[*range(4)]], 4, 256, 0.01, 60, ALEXNET, "8"),
    Shipped("alexnet_4pipedream", "alexnet.gpus=4", first(3), 4, 256, 0.01, 60, ALEXNET, "5-3"),
    Shipped("alexnet_16dp", "alexnet.gpus=16", [[*range(16)]], 16, 256, 0.01, 60, ALEXNET, "8"),
    Shipped("alexnet_16pipedream", "alexnet.gpus=16", first(15), 16, 256, 0.01, 60, ALEXNET, "5-3"),
    Shipped("resnet50_16dp", "resnet50.gpus=16", [[*range(16)]], 16, 128, 0.01, 60, RESNET_16, "18"),
    Shipped("gnmt_4dp", "gnmt.gpus=4", [[*range(4)]], 4, 64, 0.0003, 10, GNMT_4, "8"),
    Shipped("gnmt_4pipedream", "gnmt.gpus=4", each(4), 4, 64, 0.0003, 10, GNMT_4, "2-3-2-1"),
    Shipped("gnmt_12dp", "gnmt.gpus=12", [[*range(12)]], 12, 64, 0.0003, 10, GNMT_12, "8"),
    Shipped("gnmt_12pipedream", "gnmt.gpus=12", each(10), 12, 64, 0.0003, 10, GNMT_12, "0-1-1-1-1-1-1-1-1-0"),
    Shipped("gnmt_large_4dp", "gnmt_large.gpus=4", [[*range(4)]], 4, 64, 0.0003, 10, LARGE_4, "16"),
    Shipped("gnmt_large_4pipedream", "gnmt_large.gpus=4", each(4), 4, 64, 0.0003, 10, LARGE_4, "5-5-4-2"),
    Shipped("gnmt_large_16dp", "gnmt_large.gpus=16", [[*range(16)]], 16, 64, 0.0003, 10, LARGE_16, "16"),
    Shipped(
        *("gnmt_large_16pipedream", "gnmt_large.gpus=16", each(14), 16, 64, 0.0003, 10),
        *(LARGE_16, "1-1-2-2-2-1-1-1-1-1-1-1-1-0"),
    ),
]


def laid_out(folder: Path, said: Shipped) -> Path:
    """The file and those that it names, as in the public repository."""
    kind = "translation" if "gnmt" in said.name else "image_classification"
    runtime, (arch, gpus) = folder / "runtime" / kind, said.module.split(".", 1)
    package = runtime / "models" / arch / gpus
    write_package(package, said.package)
    depth = {"stage_to_depth_map": dict(enumerate(map(int, said.depth.split("-"))))} if said.depth else {}
    one_stage = len(said.ranks) == 1
    stages = [0 if one_stage else min(module, len(said.ranks) - 1) for module in range(len(said.package) + 1)]
    ranks = {str(stage): one for stage, one in enumerate(said.ranks)}
    content = {"module_to_stage_map": stages, "stage_to_rank_map": ranks, **depth}
    (package / "conf.json").write_text(json.dumps(content))
    hosts = HOSTS[said.gpus]
    return write_driver(
        runtime / "driver_configs" / f"{said.name}.yml",
        module=f"models.{said.module}",
        config_file=f"models/{arch}/{gpus}/conf.json",
        machines=[f"{hosts[rank // 4]}:{rank}" for rank in range(said.gpus)],
        batch_size=said.batch,
        learning_rate=said.rate,
        weight_decay=0.0 if kind == "translation" else 0.0005,
        epochs=said.epochs,
        model_type=kind,
        synthetic_data=True if arch == "alexnet" else None,
        translation_model=False if said.name == "vgg16_4pipedream" else None,
    )


SMALLEST = ("vgg16_4dp", "vgg16_4pipedream", "alexnet_4pipedream", "resnet50_16dp", "gnmt_4pipedream")


@pytest.mark.parametrize(
    "said",
    drawn(FILES, 4, always=[file for file in FILES if file.name in (*SMALLEST, "gnmt_large_16pipedream")]),
    ids=lambda said: said.name,
)
def test_every_shipped_file_is_a_whole_experiment(tmp_path: Path, said: Shipped) -> None:
    made = compose([f"pipedream={laid_out(tmp_path, said)}"])
    model, train, parallel = made.model, made.train, made.parallel
    arch = said.module.split(".")[0]
    assert made.name == said.name
    assert model.name == {"gnmt_large": "gnmt-16"}.get(arch, arch)
    assert (str(made.partition), parallel.depth) == (said.partition, said.depth)
    assert parallel.layout.replicas == tuple(map(len, said.ranks))
    streams = len(said.ranks) > 1
    assert (parallel.schedule == "pipedream") is streams
    assert (parallel.micro_batch_size, parallel.global_batch_size) == (said.batch, said.batch * len(said.ranks[0]))
    assert (train.lr, train.min_lr, train.lr_policy, train.lr_power) == (said.rate, 0.0, "polynomial", 2.0)
    assert (train.optimizer, train.weight_decay) == (("adam", 0.0) if "gnmt" in arch else ("sgd", 0.0005))
    assert (train.clip_grad, train.log_interval) == (0.0, 100)
    interval = None if arch == "alexnet" else "1epoch"
    assert (train.save_interval, train.eval_interval) == (interval or "auto", interval)
    samples = said.epochs * 1_000_000 if arch == "alexnet" else None
    assert (train.iterations, train.epochs, train.samples) == (None, None if samples else said.epochs, samples)
    assert (str(made.container.kind), made.container.image) == ("docker", "nvcr.io/nvidia/pytorch:19.05-py3")
    reached = made.executor.reached
    assert [gpu for host in reached for gpu in host.gpus or ()] == list(range(sum(map(len, said.ranks))))
    assert [host.name for host in reached] == HOSTS[said.gpus]
    if "gnmt" in arch:
        assert model.untie_embeddings_and_output_weights and made.data.bucketing == 80


def notes_of(*words: str) -> list[str]:
    with command_line(words) as found:
        return list(found.notes)


def one_file(folder: Path, content: object, package: tuple[str, ...] | None = VGG_4, **values: object) -> str:
    """The word of a configuration beside a placement, and a package of stages where there is one."""
    if package is not None:
        write_package(folder / "models" / "vgg16" / "gpus=4", package)
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "conf.json").write_text(text)
        values = {"config_file": "conf.json", **values}
    return f"pipedream={write_driver(folder / 'one.yml', **values)}"


HYBRID = {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]}}
DATA = {"module_to_stage_map": [0, 0, 0], "stage_to_rank_map": {"0": [0, 1, 2, 3]}}


def test_localhost_is_this_machine(tmp_path: Path) -> None:
    made = compose([one_file(tmp_path, HYBRID)])
    assert (str(made.executor.kind), made.ranks_per_node()) == ("local", (4,))
    assert made.cluster.environment == {}
    machines = [f"localhost:{gpu}" for gpu in (2, 3, 0, 5)]
    made = compose([one_file(tmp_path, HYBRID, machines=machines)])
    assert made.cluster.environment == {"CUDA_VISIBLE_DEVICES": "2,3,0,5"}


def test_hosts_may_have_unlike_numbers_of_gpus(tmp_path: Path) -> None:
    made = compose([one_file(tmp_path, HYBRID, machines=["a:1", "b:0", "b:3", "b:2"])])
    assert [(host.name, host.gpus) for host in made.executor.reached] == [("a", (1,)), ("b", (0, 3, 2))]


def test_stages_take_their_ranks_machines_in_any_order_of_a_host(tmp_path: Path) -> None:
    content = {**HYBRID, "stage_to_rank_map": {"0": [1, 2, 3], "1": [0]}}
    made = compose([one_file(tmp_path, content, machines=["a:0", "a:1", "a:2", "a:3"])])
    assert [host.gpus for host in made.executor.reached] == [(1, 2, 3, 0)]


def test_stages_that_share_hosts_in_turn_are_said(tmp_path: Path) -> None:
    content = {**HYBRID, "stage_to_rank_map": {"0": [0, 2], "1": [1, 3]}}
    word = one_file(tmp_path, content, machines=["a:0", "a:1", "b:0", "b:1"])
    assert any("its stages share hosts in turn (a, b, a, b)" in note for note in notes_of(word))
    made = compose([word])
    assert [(host.name, host.gpus) for host in made.executor.reached] == [("a", (0, 1)), ("b", (0, 1))]
    assert made.parallel.layout.replicas == (2, 2)


def test_machines_without_a_rank_are_left_out_and_said(tmp_path: Path) -> None:
    content = {**HYBRID, "stage_to_rank_map": {"0": [0], "1": [1]}}
    word = one_file(tmp_path, content)
    assert any("left out localhost:2, localhost:3: no stage has a rank there" in note for note in notes_of(word))
    assert compose([word]).parallel.world_size == 2


def test_keys_without_quotes_are_read_in_a_json_file(tmp_path: Path) -> None:
    text = '{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1, 2], 1: [3]}}'
    assert compose([one_file(tmp_path, text)]).parallel.layout.replicas == (3, 1)


def test_a_stage_with_nothing_to_train_is_left_out(tmp_path: Path) -> None:
    content = {"module_to_stage_map": [0, 1, 2, 2], "stage_to_rank_map": {"0": [0], "1": [1, 2], "2": [3]}}
    word = one_file(tmp_path, content, ("-", "3" * 7, "3" * 6 + "LLL"))
    made = compose([word])
    assert (str(made.partition), made.parallel.layout.replicas) == ("7-9", (2, 1))
    assert made.cluster.environment == {"CUDA_VISIBLE_DEVICES": "1,2,3"}
    assert any(note.startswith("stage 0 has nothing to train") for note in notes_of(word))


def test_a_bottleneck_is_where_its_middle_is(tmp_path: Path) -> None:
    write_package(tmp_path / "models" / "resnet50" / "gpus=4", RESNET_16)
    content = {"module_to_stage_map": [0, 1, 2, 2], "stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3]}}
    made = compose([one_file(tmp_path, content, None, module="models.resnet50.gpus=4")])
    assert str(made.partition) == "7-5-6"


@pytest.mark.parametrize(
    ("values", "words", "notes"),
    [
        ({"recompute": True}, {"parallel.recompute": "full"}, ""),
        ({"no_input_pipelining": True}, {"parallel.depth": "0-0"}, ""),
        (
            {"compress_activations": True, "compress_in_gpu": True},
            {"parallel.compress": "int8"},
            "compress_activations: stages send activations and their gradients in 8 bits",
        ),
        (
            {"compress_in_gpu": True},
            {"parallel.compress": "none"},
            "compress_in_gpu has no effect without compress_activations",
        ),
        ({"macrobatch": True}, {"parallel.update_every": 2}, "macrobatch: stages update after two rounds"),
        ({"learning_rate_policy": "exponential_decay"}, {"train.lr_policy": "linear", "train.min_lr": 0.0097}, ""),
        ({"learning_rate_policy": "step", "epochs": 30}, {"train.lr_policy": "constant"}, ""),
        ({"learning_rate_policy": None, "epochs": 7}, {"train.lr_policy": "constant"}, ""),
        ({"learning_rate": "1e-3"}, {"train.lr": 0.001}, ""),
        ({"batch_size": None}, {"parallel.micro_batch_size": 256}, ""),
        ({"colour": "blue"}, {}, "unknown to tdpp, so ignored: colour"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_other_keys_have_their_place(
    tmp_path: Path, values: dict[str, object], words: dict[str, object], notes: str
) -> None:
    word = one_file(tmp_path, HYBRID, **values)
    made = compose([word])
    for key, value in words.items():
        part, name = key.split(".")
        found = getattr(getattr(made, part), name)
        assert found == pytest.approx(value) if isinstance(value, float) else found == value
    if notes:
        assert notes in " ".join(notes_of(word))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"compress_activations": "8"}, "compress_activations=8: it must be True or False"),
        ({"model_type": "speech_to_text"}, "model_type=speech_to_text: tdpp has no other models; it must be"),
        ({"machines": ["localhost"]}, "machines: localhost: it must be a list of HOST:GPU"),
        ({"machines": []}, "machines=[]: it must be a list of HOST:GPU"),
        ({"machines": ["a:0", "a:0"]}, "machines: a:0 is listed twice"),
        ({"batch_size": "many"}, "batch_size=many: it must be a whole number, at least 1"),
        ({"epochs": True}, "epochs=True: it must be a whole number, at least 1"),
        ({"learning_rate": "fast"}, "learning_rate=fast: it must be a number, at least 0"),
        ({"recompute": "yes"}, "recompute=yes: it must be True or False"),
        ({"distributed_backend": "mpi"}, "distributed_backend=mpi: ranks send through NCCL or gloo; it must be nccl"),
        ({"learning_rate_policy": "cosine"}, "learning_rate_policy=cosine: it is not a policy; it must be step"),
        ({"learning_rate_policy": "step"}, "learning_rate_policy=step: the rate falls every 30 epochs; give"),
        ({"lr_warmup": True}, "lr_warmup=True: the warm-up lasts 5 epochs; give train.lr_warmup_iterations"),
        ({"log_directory": None}, "log_directory is missing: the folder of all runs"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, values: dict[str, object], said: str) -> None:
    word = one_file(tmp_path, HYBRID, **values)
    with pytest.raises(ConfigError) as error:
        compose([word])
    assert str(error.value).startswith(f"{word} cannot be trained unchanged:\n  ")
    assert said in str(error.value)


def test_each_fault_has_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        compose([one_file(tmp_path, HYBRID, epochs=-1, batch_size=0, recompute=3)])
    assert len(str(error.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"module_to_stage_map": [0, 2, 2], "stage_to_rank_map": {"0": [0]}}, "stages must be 0, 1, … in the order"),
        ({"module_to_stage_map": [1, 0, 0], "stage_to_rank_map": {"0": [0], "1": [1]}}, "stages must be 0, 1, …"),
        ({"module_to_stage_map": "0-1"}, "it must list the stage of each module and of the loss"),
        ({**HYBRID, "stage_to_rank_map": {"0": [0, 1], "1": [1]}}, "each rank from 0 to 2 must occur once"),
        ({**HYBRID, "stage_to_rank_map": {"0": [0]}}, "it must have stages 0, 1"),
        ({**HYBRID, "stage_to_rank_map": {"0": [], "1": [0]}}, "each stage must have a list of ranks"),
        ({**HYBRID, "stage_to_depth_map": {"0": -1, "1": 0}}, "each stage must have a whole number, at least 0"),
        ({**HYBRID, "stage_to_rank_map": {"0": [0, 1, 2, 3], "1": [4]}}, "has 5 ranks, but machines has 4 GPUs"),
        ({**HYBRID, "module_to_stage_map": [0, 1, 1, 1]}, ""),
        ("[1, 2]", "the file has no keys"),
        ("{", "neither YAML nor JSON"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_placement_that_cannot_be_is_refused(tmp_path: Path, content: object, said: str) -> None:
    word = one_file(tmp_path, content)
    if not said:  # modules that do not fit: their division is found without them
        assert any("4 entries, but" in note for note in notes_of(word))
        return
    with pytest.raises(ConfigError) as error:
        compose([word])
    assert f"{word}: config_file" in str(error.value)
    assert said in str(error.value)


def test_without_its_stage_modules_a_division_is_found_and_said(tmp_path: Path) -> None:
    word = one_file(tmp_path, HYBRID, None)
    assert any("the stages of models.vgg16.gpus=4 are not beside the file" in note for note in notes_of(word))
    made = compose([word])
    assert sum(made.partition.layers) == 16 and all(made.partition.layers)
    assert compose([word, "parallel.partition=12-4"]).partition.layers == (12, 4)


def test_another_models_stages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 8 layers that are blocks in tdpp, but model=vgg16 has 16 blocks"):
        compose([one_file(tmp_path, HYBRID, ALEXNET)])


def test_a_model_that_is_not_known_is_named(tmp_path: Path) -> None:
    word = one_file(tmp_path, HYBRID, module="models.inception_v3.gpus=4")
    with pytest.raises(ConfigError, match=r"inception_v3 is not a known model \(vgg16, resnet50"):
        compose([word])
    made = compose([word, "model=vgg-tiny", "parallel.partition=3-3"])
    assert (made.model.name, str(made.partition)) == ("vgg-tiny", "3-3")


def test_a_type_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_type=translation: model=vgg16 is of model\.family=vgg"):
        compose([one_file(tmp_path, DATA, model_type="translation")])


def test_words_of_the_command_line_are_stronger(tmp_path: Path) -> None:
    word = one_file(tmp_path, HYBRID, learning_rate_policy="step")
    words = ("parallel.depth=2-0", "train.lr=0.5", "train.lr_step_iterations=9", "train.iterations=70")
    made: Experiment = compose([*words, word, "data.prefix=data/mine", "container=none", "name=mine"])
    assert (made.parallel.depth, made.train.lr, made.train.lr_step_iterations) == ("2-0", 0.5, 9)
    assert (made.train.iterations, made.train.epochs) == (70, None)
    assert (made.data.prefix, str(made.container.kind), made.name) == ("data/mine", "none", "mine")
    made = compose([word, "parallel=single", "cluster=local", "train.lr_policy=constant", "model=vgg-tiny"])
    assert (made.parallel.world_size, made.parallel.replicas, made.cluster.name) == (1, None, "local")


def test_one_file_at_a_time(tmp_path: Path) -> None:
    word = one_file(tmp_path, HYBRID)
    with pytest.raises(ConfigError, match="occurs 2 times"):
        compose([word, word])
    with pytest.raises(ConfigError, match="is a whole experiment, like experiment="):
        compose([word, "experiment=demo"])
    with pytest.raises(ConfigError, match=r"pipedream=nowhere\.yml: cannot be read: No such file"):
        compose(["pipedream=nowhere.yml"])


def test_without_stages_and_ranks_there_is_one(tmp_path: Path) -> None:
    assert compose([one_file(tmp_path, None, machines=["localhost:0"])]).parallel.world_size == 1
    with pytest.raises(ConfigError, match="config_file is missing, so there is one rank, but machines has 4"):
        compose([one_file(tmp_path, None)])


def test_a_placement_is_written_as_it_is_read(tmp_path: Path) -> None:
    made = placement.placed([0, 0, 1, 2, 2], [3, 2, 1], [2, 1, 0])
    (tmp_path / "conf.json").write_text(made.text())
    assert placement.read(tmp_path / "conf.json", "file") == made
    assert json.loads(made.text())["stage_to_rank_map"] == {"0": [0, 1, 2], "1": [3, 4], "2": [5]}


def test_the_page_has_every_key() -> None:
    page = (ROOT / "docs" / "pipedream-driver.md").read_text()
    keys = {field.name for field in fields(Driver)} - {"kind", "unknown"} | {"model_type"}
    assert {key for key in keys if f"`{key}`" not in page} == set()


def test_a_model_that_the_driver_does_not_know_has_no_configuration_of_it() -> None:
    found = export.files_of("my-gpt", [2, 1], "graph", ["a:0", "a:1", "a:2"], None, partition=[3, 1])
    folder = Path("models/my_gpt/gpus=3")
    assert set(found) == {folder / name for name in ("gpus=3.txt", *(f"{n}_conf.json" for n in ("dp", "mp", "hybrid")))}
    assert json.loads(found[folder / "mp_conf.json"])["tdpp_partition"] == [3, 1]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, ["train.lr_policy=cosine"]),
        ({"learning_rate_policy": "exponential_decay"}, ["train.lr=0.0001"]),
        ({}, ["parallel.schedule=one_f_one_b"]),
        ({}, ["parallel.schedule=gpipe"]),
        ({"macrobatch": True}, ["parallel.schedule=one_f_one_b"]),
        ({}, ["parallel.micro_batch_size=7"]),
        ({}, ["parallel.pipeline=3", "parallel.partition=4-4-8", "parallel.replicas=2-1-1", "parallel.depth=null"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_goes_with_a_value_gives_way_with_it(tmp_path: Path, values: dict[str, object], words: list[str]) -> None:
    content = {**HYBRID, "stage_to_depth_map": {"0": 1, "1": 0}}
    made = compose([one_file(tmp_path, content, **values), *words])
    assert made.parallel.global_batch_size == made.parallel.micro_batch_size * 3
    assert made.train.min_lr <= made.train.lr
