"""Every rule of a run, its names and its cluster is told in one message: the keys, the values, what would hold."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.experiment import Cluster, Experiment, Gpu, NodeGroup

BROKEN = {
    "a dry run has no metric": (
        ["sweep_metric=train/loss", "dry_run=true"],
        "sweep_metric=train/loss needs a run, and dry_run=true starts none; leave one of the two out",
    ),
    "a metric of evaluations needs evaluations": (
        ["sweep_metric=valid/loss"],
        "sweep_metric=valid/loss needs evaluations; set train.eval_interval, in iterations",
    ),
    "a sweep by cost needs prices": (
        ["sweep_metric=cost"],
        "sweep_metric=cost needs the price of every node, and cluster.groups.local.price_per_hour is not set; give "
        "it, in dollars per node",
    ),
    "a sweep runs one run at a time at least": (["max_jobs=0"], "max_jobs=0 must be at least 1"),
    "runs of this machine that nobody waits for have no limit": (
        ["max_jobs=2", "executor.wait=false"],
        "max_jobs=2 has no effect with executor.wait=false, which starts all runs on this machine at once; use "
        "executor.wait=true, which runs them one after another, or max_jobs=null",
    ),
    "a limit of GPU-hours is a number": (
        ["confirm_gpu_hours=-1"],
        "confirm_gpu_hours=-1.0 must be a number, at least 0",
    ),
    "one profiler at a time": (
        ["profile.nsys=true", "profile.ncu=true"],
        "profile.nsys=true and profile.ncu=true: a process runs under one profiler at a time; set one to false",
    ),
    "torch traces nothing under ncu": (
        ["profile.ncu=true", "profile.trace_iteration=3"],
        "profile.trace_iteration=3 must be null with profile.ncu=true, under which torch traces nothing; set "
        "train.iterations to profile few iterations",
    ),
    "time between readings of the GPUs": (
        ["profile.gpu_interval_s=-1"],
        "profile.gpu_interval_s=-1 must be at least 0",
    ),
    "no single size would fill the nodes": (
        ["cluster.groups.local.gpus_per_node=7"],
        "1 * 2 * 2 = 4 ranks, but the chosen nodes of cluster 'local', local, have 7 GPUs; "
        "change these sizes or the node order",
    ),
    **{
        f"{key} must be at least 1": ([f"{key}=0"], f"{key}=0 must be at least 1")
        for key in (
            "model.layers",
            "model.heads",
            "model.vocab_size",
            "parallel.tensor",
            "parallel.data",
            "parallel.pipeline",
            "parallel.chunks",
            "parallel.micro_batch_size",
            "parallel.global_batch_size",
            "train.iterations",
            "train.log_interval",
            "train.keep_checkpoints",
            "train.save_interval",
            "train.comm_timeout_s",
            "executor.time_min",
            "cluster.groups.local.count",
            "cluster.groups.local.gpus_per_node",
        )
    },
    "a port is one that users may open": (
        ["executor.master_port=80"],
        "executor.master_port=80 must be between 1024 and 65535",
    ),
    "a group's GPU is in the cluster": (
        ["cluster.groups.local.gpu=a10"],
        "cluster.groups.local.gpu=a10 is not in cluster.gpus; that has cpu",
    ),
    "several nodes have a number of GPUs": (
        ["cluster.groups.local.count=2"],
        "cluster.groups.local.gpus_per_node=null (as many ranks as the plan asks for) needs a cluster of one node; "
        "give the number of GPUs per node",
    ),
    "a GPU has a speed": (
        ["cluster.gpus.cpu.fp16_tflops=0"],
        "cluster.gpus.cpu.fp16_tflops=0.0 must be a number above 0",
    ),
    "a link has a bandwidth": (
        ["cluster.groups.local.inter_gbit_per_s=0"],
        "cluster.groups.local.inter_gbit_per_s=0.0 must be a number above 0",
    ),
    "a latency is not negative": (
        ["cluster.groups.local.intra_latency_us=-1"],
        "cluster.groups.local.intra_latency_us=-1.0 must be a number, at least 0",
    ),
    "a price is a number": (
        ["cluster.groups.local.price_per_hour=nan"],
        "cluster.groups.local.price_per_hour=nan must be a number, at least 0",
    ),
    "no negative failures": (
        ["cluster.groups.local.failures_per_day=-1"],
        "cluster.groups.local.failures_per_day=-1.0 must be a number, at least 0",
    ),
    "a rate of checkpoints": (
        ["cluster.checkpoint_gb_per_s=0"],
        "cluster.checkpoint_gb_per_s=0.0 must be a number above 0",
    ),
    **{
        f"{key} names something": ([f"{key}=''", *others], f"{key}='' is empty; give a path")
        for key, *others in (
            *(["runs_dir"], ["train.load"], ["parallel.schedule_file"], ["data.prefix"], ["cluster.scratch"]),
            ["container.image_dir"],
        )
    },
    "a blank is not a folder": (["runs_dir='  '"], "runs_dir='  ' is empty"),
    "a name is not a path": (["name=a/b"], "name='a/b' cannot name a run folder"),
    "a name is not an option": (["name='-x'"], "name='-x' cannot name a run folder"),
    "a name is not the folder of job links": (["name=by_job"], "name='by_job' cannot name a run folder"),
    "a name is one printable line": (["name='a\tb'"], r"name='a\tb' cannot name a run folder"),
    "a name is short enough for a folder": ([f"name='{200 * 'ä'}'"], f"name={40 * 'ä'}… has 400 bytes, but a folder's"),
    "a name is not blank": (["name=' '"], "name=' ' cannot name a run folder"),
    "a reference that leads nowhere is named": (
        ["name=${nope}"],
        "name cannot be resolved: Interpolation key 'nope' not found; give name=…",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_names_keys_values_and_what_would_hold(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(overrides)


@pytest.fixture(scope="module")
def demo() -> Experiment:
    return compose(["experiment=demo"])


@pytest.mark.parametrize("name", ["tiny", "two words", 'it\'s "it"', "größe", "2026", "a=b"])
def test_a_run_may_have_any_name_that_is_a_folder_name(demo: Experiment, name: str) -> None:
    assert replace(demo, name=name).name == name


def test_a_cluster_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("cluster.groups of cluster 'bare' is empty")):
        Cluster(name="bare")


def test_a_group_name_can_be_written_in_a_node_order() -> None:
    gpu = Gpu(name="G", memory_gib=1, fp32_tflops=1, fp16_tflops=1, bf16_tflops=1, memory_gb_per_s=1)
    links = {"intra_gbit_per_s": 1, "intra_latency_us": 0, "inter_gbit_per_s": 1, "inter_latency_us": 0}
    group = NodeGroup(gpus_per_node=1, gpu="g", **links)
    with pytest.raises(ConfigError, match=re.escape("'a+b' is not a valid group name")):
        Cluster(name="c", gpus={"g": gpu}, groups={"a+b": group})


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["train.compile=true", "parallel.schedule=zb_h1"],
            "train.compile=true cannot be combined with parallel.schedule=zb_h1",
        ),
        (
            ["experiment=seed_a10x8", "executor.rehearse=virtual"],
            "executor.rehearse=virtual rehearses the plan on this machine, but executor.kind=slurm",
        ),
        (
            ["experiment=seed_a10x8", "cluster.groups.gpu2.time_min=2"],
            "cluster.groups.gpu2.time_min=2 minutes is not longer than executor.save_s=120 seconds",
        ),
        (["executor.meet_min=0"], "executor.meet_min=0.0 must be a number above 0"),
        (["executor.save_s=1"], "executor.save_s=1 must be between 10 and 65535"),
        (["train.seed=-1"], "train.seed=-1 must be between 0 and 4294967295"),
        (["train.seed=4294967296"], "train.seed=4294967296 must be between 0 and 4294967295"),
        (
            ["parallel.tensor=2", "parallel.data=1", "parallel.sequence_parallel=true", "model.sequence_length=127"],
            "model.sequence_length=127 is not divisible by parallel.tensor=2",
        ),
    ],
    ids=[
        "compiled-zero-bubble",
        "rehearsed-on-slurm",
        "no-time-to-train",
        "no-time-to-meet",
        "no-time-to-save",
        "negative-seed",
        "large-seed",
        "sequence",
    ],
)
def test_what_does_not_go_together_is_told(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    assert told in str(error.value)
