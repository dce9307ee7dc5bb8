"""`engine=megatron_lm`: the command line is one that Megatron-LM understands, and its runs are watched like ours."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from launch.control.follow import follow
from launch.control.megatron_lm import check, worker
from launch.control.planning.plan import make_plan
from launch.control.stop import stop
from launch.control.submit import submit
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from launch.node.worker_command import Master
from megatron_ext.contract.layout import megatron_layout
from tests.support import ROOT
from tests.support.launch.live import TWO_NODES, agents, done, token, wait_for
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
STAND_IN = ("engine=megatron_lm", f"engine.checkout={CHECKOUT}", "cluster.gpus.cpu.name=stand-in")
SHORT = ("parallel.data=1", "train.iterations=6", "train.log_interval=2")


def torchrun(experiment: Experiment, node_rank: int) -> list[str]:
    runner = worker(experiment, make_plan(experiment, "a/b"), RunDir(Path("/runs/a/b")), "python3")
    return runner.torchrun(node_rank, Master("gpu2-0.cluster", 6000))


def options(*overrides: str) -> list[str]:
    """Those of pretrain_gpt.py."""
    words = torchrun(compose([*SEED, *overrides]), 0)
    return words[words.index("/opt/megatron-lm/pretrain_gpt.py") + 1 :]


def value(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def as_lines(words: list[str]) -> str:
    """A line for the script, and for each option with its value."""
    return " ".join("\n" * (word.startswith("--") or word.endswith(".py")) + word for word in words).replace(
        " \n", "\n"
    )


@pytest.mark.parametrize("node_rank", [0, 7])
def test_the_seeds_plan_is_this_command_line(node_rank: int) -> None:
    _python, *words = torchrun(compose(SEED), node_rank)
    assert as_lines(words) == (GOLDEN / f"megatron_lm_seed_node{node_rank}.txt").read_text()


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


def test_no_timers_without_a_timeline_and_no_files_without_checkpoints() -> None:
    words = options("profile.timeline=false", "train.checkpoint=false")
    assert not {"--timing-log-level", "--timing-log-option", "--save", "--load", "--save-interval"} & set(words)


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


def test_a_checkout_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"engine\.checkout=.*/pretrain_gpt\.py does not exist"):
        check(compose([*STAND_IN, f"engine.checkout={tmp_path}"]))


def test_a_dry_run_shows_the_command_of_every_node(tmp_path: Path) -> None:
    shown = done("launch", *SEED, "executor=local", "container=none", "dry_run=true", "--full", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("torch.distributed.run") == 8
    assert "--node-rank 7 --master-addr '<host of node 0>' --master-port '<port>'" in shown.stdout
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in shown.stdout


@pytest.mark.slow
def test_launch_status_and_report_serve_a_run_of_megatron_lm(tmp_path: Path) -> None:
    launched = done("launch", *STAND_IN, *SHORT, cwd=tmp_path)
    run = RunDir.find(tmp_path / "runs", None)
    assert launched.returncode == 0, run.node_err("local-0").read_text()
    assert launched.stdout == f"{run.name}: succeeded, 2 ranks exited with 0; iteration 6 of 6 logged\n"
    assert [line.split("iteration")[1].split()[0] for line in launched.stderr.splitlines()[1:-1]] == [
        "1/6",
        "2/6",
        "4/6",
        "6/6",
    ]
    status = json.loads(done("status", "--json", cwd=tmp_path).stdout)
    assert (status["state"], status["iteration"], status["loss"]) == ("succeeded", 6, 4.94)
    assert status["ms_per_iteration"] == 24.0
    reported = done("report", cwd=tmp_path)
    assert reported.returncode == 0
    assert reported.stderr.splitlines() == [
        "next: tdpp report --open  # in a browser; on a machine without one, --serve instead of --open"
    ]
    page = run.report.joinpath("index.html").read_text()
    for part in ("Megatron-LM", "4.9400", "6 of 6", "forward-backward", "2,010.2"):
        assert part in page


def test_two_nodes_meet_where_the_first_one_says(runs: Path) -> None:
    run = start(runs, *TWO_NODES, "cluster.groups.local.gpus_per_node=1", *SHORT)
    follow(run)
    assert judge(run).state == State.succeeded, run.node_err("local-1").read_text()
    assert set(run.read_json(run.address)) == {"start", "host", "port"}


def test_a_failed_rank_fails_the_run(runs: Path) -> None:
    run = start(runs, *SHORT, "+cluster.environment.FAIL_RANK='1'")
    follow(run)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.failed, "worker-failed")
    assert "RuntimeError: out of luck" in run.node_err("local-0").read_text()


def test_a_run_that_is_stopped_leaves_nothing(runs: Path) -> None:
    run = start(runs, *SHORT, "train.iterations=100000")
    wait_for(lambda: b" iteration " in log(run), 60)
    assert stop(run) != "no process was left"
    assert judge(run).state == State.stopped
    assert processes.find(token(run)) == set()


def test_ranks_end_with_a_killed_agent(runs: Path) -> None:
    run = start(runs, *SHORT, "train.iterations=100000")
    wait_for(lambda: b" iteration " in log(run), 60)
    os.kill(agents(run)[0], signal.SIGKILL)
    wait_for(lambda: not processes.find(token(run)), 60)
    assert judge(run).state == State.lost


def log(run: RunDir) -> bytes:
    path = run.node_out("local-0")
    return path.read_bytes() if path.exists() else b""


def start(runs: Path, *overrides: str) -> RunDir:
    settings = [f"runs_dir={runs}", *STAND_IN, *overrides]
    return submit(compose(settings), settings)
