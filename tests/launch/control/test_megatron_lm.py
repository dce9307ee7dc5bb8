"""`engine=megatron_lm`: the options are ones that Megatron-LM understands (its runs: test_megatron_lm_runs.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from launch.control.megatron_lm import check, script
from launch.errors import LaunchError
from megatron_ext.contract.layout import megatron_layout
from tests.support import ROOT
from tests.support.launch.live import done
from tests.support.launch.megatron_lm import pretrain_gpt

GOLDEN = ROOT / "tests" / "launch" / "golden"
CHECKOUT = Path(pretrain_gpt.__file__).parent
SEED = (
    "experiment=seed_a10x8",
    "engine=megatron_lm",
    "engine.checkout=/opt/megatron-lm",
    "engine.vocab_file=/data/gpt2-vocab.json",
    "engine.merge_file=/data/gpt2-merges.txt",
    "data.prefix=/data/xl/my-gpt2_text_document",
)
STAND_IN = ("engine=megatron_lm", f"engine.checkout={CHECKOUT}")


def options(*overrides: str) -> list[str]:
    """Those of pretrain_gpt.py."""
    path, *words = script(compose([*SEED, *overrides]), Path("/runs/a/b/checkpoints"))
    assert path == "/opt/megatron-lm/pretrain_gpt.py"
    return words


def value(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def as_lines(words: list[str]) -> str:
    """A line for the script, and for each option with its value."""
    return " ".join("\n" * (word.startswith("--") or word.endswith(".py")) + word for word in words).replace(
        " \n", "\n"
    )


def test_the_seeds_plan_is_these_options() -> None:
    assert as_lines(options()).strip() + "\n" == (GOLDEN / "megatron_lm_seed.txt").read_text()


EVERYTHING = (
    "parallel.tensor=2",
    "parallel.data=2",
    "parallel.sequence_parallel=true",
    "parallel.sharded_optimizer=true",
    "parallel.schedule=interleaved",
    "parallel.chunks=2",
    "parallel.partition=null",
)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*EVERYTHING, "parallel.recompute=full", "train.precision=bf16"],
        ["parallel.recompute=selective", "train.precision=fp16", "train.checkpoint=false", "profile.timeline=false"],
        [
            "engine.vocab_file=null",
            "engine.merge_file=null",
            "train.lr_decay_iterations=null",
            "train.lr_warmup_iterations=0",
        ],
        [
            *("model.normalization=RMSNorm", "model.norm_epsilon=1e-6", "model.position_embedding_type=rope"),
            *("model.rotary_base=500000", "model.rope_scaling_factor=8", "model.swiglu=true", "model.ffn_hidden=4000"),
            *("model.num_query_groups=8", "model.add_bias_linear=false"),
            "model.untie_embeddings_and_output_weights=true",
        ],
    ],
    ids=["plain", "everything", "little", "no-tokenizer", "llama"],
)
def test_megatron_lm_has_every_option_and_takes_as_many_values(overrides: list[str]) -> None:
    parsed = pretrain_gpt.parser().parse_args(options(*overrides))
    assert parsed.num_layers == "48"


@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        (["parallel.sequence_parallel=true", "parallel.tensor=2", "parallel.data=2"], ["--sequence-parallel"]),
        (["parallel.sharded_optimizer=true"], ["--use-distributed-optimizer"]),
        (["parallel.recompute=selective"], ["--recompute-granularity selective"]),
        (
            ["parallel.recompute=full"],
            ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
        ),
        (["train.precision=bf16"], ["--bf16"]),
        (["train.save_interval=20", "train.save_async=true"], ["--save-interval 20", "--async-save"]),
        (["train.comm_timeout_s=61"], ["--distributed-timeout-minutes 2"]),
        (["engine.arguments=[--seed,'7']"], ["--seed 7"]),
        (["model.ffn_hidden=4000", "model.swiglu=true"], ["--ffn-hidden-size 4000", "--swiglu"]),
        (["model.swiglu=true"], ["--ffn-hidden-size 6400", "--swiglu"]),  # which Megatron-LM by itself has smaller
        (["model.kv_channels=128"], ["--kv-channels 128"]),
        (["model.hidden_dropout=0.1"], ["--hidden-dropout 0.1"]),
        (["model.attention_dropout=0.2"], ["--attention-dropout 0.2"]),
        (["model.num_query_groups=8"], ["--group-query-attention", "--num-query-groups 8"]),
        (
            ["model.normalization=RMSNorm", "model.norm_epsilon=1e-6"],
            ["--normalization RMSNorm", "--norm-epsilon 1e-06"],
        ),
        (
            [
                *("model.position_embedding_type=rope", "model.rotary_base=500000", "model.rotary_percent=0.5"),
                "model.rope_scaling_factor=8",
            ],
            [
                *("--position-embedding-type rope", "--rotary-base 500000", "--rotary-percent 0.5"),
                *("--use-rope-scaling", "--rope-scaling-factor 8.0"),
            ],
        ),
        (
            ["model.add_bias_linear=false", "model.untie_embeddings_and_output_weights=true"],
            ["--disable-bias-linear", "--untie-embeddings-and-output-weights"],
        ),
        (["data.blend=[{prefix:/b,weight:3}]"], ["--data-path 1.0 /data/xl/my-gpt2_text_document 3.0 /b"]),
        (
            ["engine.vocab_file=null", "engine.merge_file=null"],
            ["--tokenizer-type NullTokenizer", "--vocab-size 50257"],
        ),
    ],
    ids=lambda value: value[0].partition("=")[0] if "=" in value[0] else "",
)
def test_a_key_adds_or_changes_its_options_only(overrides: list[str], given: list[str]) -> None:
    plain, changed = as_lines(options()).splitlines(), as_lines(options(*overrides)).splitlines()
    sizes = ("--tensor-model-parallel-size",)
    assert [line for line in changed if line not in plain and not line.startswith(sizes)] == given


def test_there_are_no_files_without_checkpoints() -> None:
    given = {"--save", "--load", "--save-interval", "--exit-signal-handler"}
    assert given <= set(options())
    assert not given & set(options("train.checkpoint=false"))


def test_cpus_do_without_what_only_gpus_have() -> None:
    experiment = compose([*STAND_IN, "cluster=local"])
    words = script(experiment, Path("checkpoints"))
    assert value(words, "--distributed-backend") == "gloo"
    assert pretrain_gpt.parser().parse_args(words[1:]).transformer_impl == "local"
    assert "--distributed-backend" not in options()


def test_a_resumed_run_loads_what_it_saved() -> None:
    words = options()
    assert value(words, "--load") == value(words, "--save") == "/runs/a/b/checkpoints"


@pytest.mark.parametrize(
    ("partition", "pipeline", "said"),
    [
        ([0, 11, 8, 8, 8, 8, 5, 0], 8, "E|t*11|t*8|t*8|t*8|t*8|t*5|L"),
        ([1, 3], 2, "Et*1|t*3L"),
        ([2, 0, 2], 3, "Et*2||t*2L"),
        ([1, 1, 1, 1], 2, "Et*1|t*1|t*1|t*1L"),
        ([4], 1, None),
    ],
    ids=["seed", "two-stages", "an-empty-stage", "two-chunks", "one-stage"],
)
def test_a_partition_is_said_as_a_layout(partition: list[int], pipeline: int, said: str | None) -> None:
    assert megatron_layout(partition, pipeline) == said


@given(st.lists(st.integers(0, 40), min_size=2, max_size=16))
def test_a_layout_has_the_layers_of_its_partition(partition: list[int]) -> None:
    """Read as the documentation of Megatron-LM says: bars between stages, `x*n` for n times x."""
    said = megatron_layout(partition, len(partition))
    assert said is not None
    stages = [stage.strip("EL").removeprefix("t*") or "0" for stage in said.split("|")]
    assert [int(layers) for layers in stages] == partition
    assert (said[0], said[-1], said.count("E"), said.count("L")) == ("E", "L", 1, 1)


def checkout(tmp_path: Path, requires: str = ">=3.8") -> tuple[str, ...]:
    """GPUs without a container, and a checkout that says which Python it wants."""
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "pyproject.toml").write_text(f'[project]\nrequires-python = "{requires}"\n')
    return (*SEED, "executor=local", "container=none", f"engine.checkout={tmp_path}")


def test_a_checkout_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"engine\.checkout=.*/pretrain_gpt\.py does not exist"):
        check(compose([*STAND_IN, f"engine.checkout={tmp_path}"]))


def test_a_python_that_is_too_old_is_told_with_what_helps(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"needs Python 3\.99, .*container.image.*environment.*an older checkout"):
        check(compose([*checkout(tmp_path, ">=3.99,<4"), "engine.arguments=[--transformer-impl,local]"]))


def test_a_missing_transformer_engine_is_told_with_what_helps(tmp_path: Path) -> None:
    words = checkout(tmp_path)
    with pytest.raises(LaunchError, match=r"Transformer Engine.s, .*container.image.*install.*impl,local"):
        check(compose([*words]))
    for argument in ("[--transformer-impl,local]", "['--transformer-impl=local']"):
        check(compose([*words, f"engine.arguments={argument}"]))
    check(compose([*STAND_IN, "cluster=local"]))  # CPUs have none, and need none


def test_what_a_container_has_is_known_there_alone() -> None:
    check(compose(SEED))


def test_a_dry_run_shows_the_worker_of_every_node(tmp_path: Path) -> None:
    shown = done("launch", *SEED, "executor=local", "container=none", "dry_run=true", "--full", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("-m tests.support.launch.stand_in_worker") == 8
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in shown.stdout
