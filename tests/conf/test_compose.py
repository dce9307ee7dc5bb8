"""Everything that ships composes to one frozen, checked experiment; what is unknown is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf.compose import compose, config_text, read_experiment
from conf.errors import ConfigError
from conf.schema.experiment import ContainerKind, EngineKind, ExecutorKind, Experiment, Het
from conf.schema.train import Precision
from conf.schema.values.partition import Partition
from tests.support import ROOT, composing

EXPERIMENT = compose()
SHIPPED = {
    group.name: sorted(file.stem for file in group.glob("*.yaml"))
    for group in sorted((ROOT / "conf").iterdir())
    if group.is_dir() and any(group.glob("*.yaml"))
}


def read(group: str, choice: str) -> dict:
    """A file's keys, above those of the files of its group on which it rests."""
    own = yaml.safe_load((ROOT / "conf" / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    for base in own.get("defaults", []):
        if isinstance(base, str) and base != "_self_" and "/" not in base and "@" not in base:
            own = OmegaConf.to_container(OmegaConf.merge(read(group, base), own))
    return own


def compatible(group: str, choice: str) -> list[str]:
    """The choice, and what the rest of the default configuration must be for it to fit.

    A cluster wants a plan with as many ranks as it has GPUs, a model a plan without a partition made for another
    one, a plan a model with as many layers as its partition and no nodes of another cluster; Megatron-LM a checkout
    and GPUs; a GPU a place in the cluster.
    """
    if group == "cluster":
        nodes = read(group, choice)["groups"].values()
        ranks = sum(node["count"] * (node["gpus_per_node"] or 1) for node in nodes)
        return [
            f"cluster={choice}",
            "parallel=single",
            f"parallel.data={ranks}",
            f"parallel.global_batch_size={2 * ranks}",
        ]
    if (group, choice) == ("model", "module"):
        code = ROOT / "tests" / "support" / "megatron_ext" / "user_models.py"
        return ["model=module", f"model.code={code}:convnet", "parallel.partition=4-5"]
    if (group, choice) == ("model", "huggingface"):
        config = ROOT / "tests" / "support" / "megatron_ext" / "qwen3.json"
        return ["model=huggingface", f"model.config={config}", "parallel.partition=null"]
    if group == "model":
        engine = ["engine=megatron_core"] if read(group, choice).get("experts") else []
        return [f"model={choice}", "parallel.partition=null", *engine]
    if group == "parallel":
        partition = read(group, choice).get("partition")
        layers = [f"model.layers={sum(Partition.parse(partition).layers)}"] if partition else []
        order = ["parallel.node_order=null"] if read(group, choice).get("node_order") else []
        return [f"parallel={choice}", *layers, *order]
    if (group, choice) == ("engine", "megatron_lm"):
        return ["experiment=seed_a10x8", "engine=megatron_lm", "engine.checkout=/opt/megatron-lm"]
    if (group, choice) == ("executor", "hosts"):
        return ["executor=hosts", "executor.hosts=[a:2,b:2]"]
    if group == "gpu":
        return [f"+gpu@cluster.gpus.another={choice}"]
    return [f"{group}={choice}"]


CHOICES = [(group, choice) for group, choices in SHIPPED.items() for choice in choices]


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{group}={choice}" for group, choice in CHOICES])
def test_every_shipped_file_composes_to_an_experiment(group: str, choice: str) -> None:
    experiment = composing.experiment(*compatible(group, choice))
    made = experiment.cluster.gpus["another"] if group == "gpu" else getattr(experiment, group, experiment)
    plain = {key: value for key, value in read(group, choice).items() if isinstance(value, int | float)}
    assert {key: getattr(made, key) for key in plain} == plain


@pytest.mark.parametrize("group", ["cluster", "model", "experiment"])
def test_a_file_is_found_by_the_name_it_gives(group: str) -> None:
    assert [read(group, choice)["name"] for choice in SHIPPED[group]] == SHIPPED[group]


@pytest.mark.parametrize(
    ("group", "kinds"),
    [("container", [*ContainerKind]), ("engine", [*EngineKind]), ("executor", [*ExecutorKind])],
    ids=["container", "engine", "executor"],
)
def test_every_kind_has_a_file(group: str, kinds: list[str]) -> None:
    assert {read(group, choice)["kind"] for choice in SHIPPED[group]} == set(kinds)


def test_without_overrides_it_is_the_uneven_demo() -> None:
    default, demo = compose(), compose(["experiment=demo"])
    assert len(set(default.partition.layers)) > 1
    assert (default.model, default.parallel, default.cluster) == (demo.model, demo.parallel, demo.cluster)
    assert default.executor.kind is ExecutorKind.local


@pytest.mark.parametrize("partition", ["1-3", "2-2", "3-1"])
def test_the_demo_can_be_swept_over_its_partitions(partition: str) -> None:
    assert str(compose(["model=tiny", f"parallel.partition={partition}"]).partition) == partition


def test_the_homogeneous_seed_is_the_published_run() -> None:
    seed = compose(["experiment=seed_a10x8"])
    assert seed.parallel.world_size == 32
    assert seed.parallel.micro_batches == 16
    assert str(seed.partition) == "0-11-8-8-8-8-5-0"
    assert seed.ranks_per_node() == (4,) * 8
    assert seed.data.prefix == "xl/my-gpt2_text_document"
    assert (seed.container.kind, seed.executor.het) == (ContainerKind.enroot, Het.jobs)


@pytest.mark.parametrize(
    "words", [[], ["experiment=seed_a10x8"], ["experiment=nmt_lab"], ["experiment=gnmt_iidp"]], ids=str
)
def test_what_hydra_has_merged_into_the_schema_is_as_if_merged_anew(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = compose(words)
    monkeypatch.setattr("conf.reading.yaml_lines.is_of", lambda *_: False)
    assert compose(words) == quick


@pytest.mark.parametrize("seed", ["seed_a10x8", "seed_a100x1_a10x7"])
def test_the_seeds_train_in_fp16_as_the_loss_scale_of_their_logs_says(seed: str) -> None:
    assert compose([f"experiment={seed}"]).train.precision is Precision.fp16


def test_the_lab_is_the_published_training_on_two_hosts() -> None:
    lab = compose(["experiment=nmt_lab"])
    assert [host.name for host in lab.executor.reached] == ["v100a", "v100b"]
    assert lab.ranks_per_node() == (2, 2)
    assert lab.parallel.global_batch_size == 4 * 256
    assert lab.price_per_hour() == 13
    assert lab.train.lr == pytest.approx(2 / (512 * 8000) ** 0.5, rel=1e-3)
    assert compose(["experiment=nmt_lab", "cluster=p100x2"]).price_per_hour() == 9


def test_the_heterogeneous_seed_has_the_a100_node_as_master() -> None:
    seed = compose(["experiment=seed_a100x1_a10x7"])
    assert seed.node_order.groups == ("hgx", *("gpu2",) * 7)
    assert [seed.cluster.groups[name].gres for name in seed.node_order.groups[:2]] == ["gpu:a100:4", "gpu:a10:4"]


@pytest.mark.parametrize(
    ("model", "weights"),
    [("small", 354_823_168), ("xl", 1_557_611_200), ("2.7b", 2.7e9), ("6.7b", 6.7e9), ("13b", 13e9)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_has_as_many_weights_as_published(model: str, weights: float) -> None:
    """GPT-2: the published checkpoints, whose heads share the same weights; GPT-3: the rounded names."""
    rounded = 0.03 if isinstance(weights, float) else 0
    found = composing.experiment(f"model={model}", "parallel.partition=null").model
    assert found.parameters() == pytest.approx(weights, rel=rounded)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_the_padded_vocabulary_is_divisible_by_the_tensor_size(tensor: int) -> None:
    model = composing.experiment("model=small", "parallel.partition=null").model
    padded = model.padded_vocab(tensor)
    assert padded % (tensor * model.vocab_multiple) == 0
    assert 0 <= padded - model.vocab_size < tensor * model.vocab_multiple


def parts(value: object) -> list[tuple[object, str]]:
    """Every node of the configuration, with the name of one of its fields."""
    fields = getattr(value, "__dataclass_fields__", {})
    children = [getattr(value, name) for name in fields]
    children += [entry for child in children if isinstance(child, dict) for entry in child.values()]
    own = [(value, next(iter(fields)))] if fields else []
    return own + [part for child in children for part in parts(child)]


def test_nothing_of_an_experiment_can_be_assigned() -> None:
    found = parts(compose())
    assert {type(node).__name__ for node, _ in found} >= {"Experiment", "Gpu", "NodeGroup", "Profile"}
    for node, name in found:
        with pytest.raises(FrozenInstanceError):
            setattr(node, name, None)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("executor.foo=1", "executor.foo is not a key"),
        ("+executor.foo=1", "executor.foo is not a key"),
        ("+cluster.groups.local.foo=1", "cluster.groups.local.foo is not a key"),
        ("+foo=1", "foo is not a key"),
        ("model=huge", "model/huge"),
        ("train.iterations=many", "train.iterations=many"),
        ("container.kind=docker", "container.kind=docker"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_key_choice_or_type_is_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        compose([override])


def test_composing_leaves_nothing_behind() -> None:
    first: Experiment = compose(["train.seed=7"])
    assert first.train.seed == 7
    assert compose().train.seed == 1234


APP = """
import hydra
from conf.compose import to_experiment
from conf.hydra_files import register
register()

@hydra.main(config_path="pkg://conf", config_name="config", version_base="1.3")
def main(cfg):
    print("ran", to_experiment(cfg).partition)

main()
"""


@pytest.fixture
def app(tmp_path: Path):
    script = tmp_path / "app.py"
    script.write_text(APP, encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()

    def run(*arguments: str) -> tuple[str, list[str]]:
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=work, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout, sorted(str(file.relative_to(work)) for file in work.rglob("*") if file.is_file())

    return run


def test_hydra_writes_nothing_for_a_run(app) -> None:
    assert app() == ("ran 1-3\n", [])


def test_help_lists_every_group_with_its_choices(app) -> None:
    output, files = app("--help")
    for group, choices in SHIPPED.items():
        assert f"{group}: {', '.join(choices)}" in output.splitlines()
    assert "usage: tdpp launch" in output
    assert files == []


@settings(max_examples=5)
@given(st.lists(st.text(alphabet="\\${}:a. 'é\n", max_size=8), min_size=40, max_size=60))
def test_what_is_frozen_for_a_run_is_what_it_was_whatever_is_in_it(texts: list[str]) -> None:
    environment = {f"X{number}": text for number, text in enumerate(["${HOME}", "\\${a}", "\\\\${", *texts])}
    experiment = replace(EXPERIMENT, cluster=replace(EXPERIMENT.cluster, environment=environment))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(config_text(experiment), encoding="utf-8")
        assert read_experiment(config) == experiment


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cluster.environment=${model.name}",
            "cluster.environment=tiny refers to a single value, but .* is a group of keys",
        ),
        (
            "cluster.groups=${name}",
            "cluster.groups=tiny refers to a single value, but cluster.groups is a group of keys",
        ),
        (
            "cluster.environment=${model}",
            "cluster.environment refers to a group of keys of another kind, {'name': 'tiny'",
        ),
        ("cluster.groups.local=${cluster.gpus.cpu}", "cluster.groups.local refers to a group of keys of another kind"),
        ("data.blend=${model.name}", "data.blend=tiny refers to a single value, but data.blend is a list"),
        ("cluster.gpus.cpu=${name}", "cluster.gpus.cpu=tiny refers to a single value"),
    ],
)
def test_a_reference_to_one_value_stands_for_no_group_of_keys(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose([override])


def test_a_group_of_keys_may_stand_for_another() -> None:
    given = ["cluster.groups.local.gpus_per_node=2", "+cluster.groups.b=${cluster.groups.local}"]
    groups = compose([*given, "parallel.data=2", "parallel.pipeline=2"]).cluster.groups
    assert groups["b"] == groups["local"]


def test_sizes_that_a_config_of_transformers_lacks_are_asked_for_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "one_of_speech", "d_model": 64, "num_heads": 4, "vocab_size": 100, "n_ctx": 32}')
    words = ["model=huggingface", f"model.config={file}", "parallel.partition=null"]
    message = f"model.layers is not set, and model.config={file} has no key for it; give model.layers=…"
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(words)
    assert compose([*words, "model.layers=4"]).model.hidden == 64
