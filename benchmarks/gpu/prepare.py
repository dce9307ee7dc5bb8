"""python -m benchmarks.gpu.prepare FOLDER: plans and data for everything that `benchmarks.gpu_training` measures.

It runs where tdpp is installed, without a GPU, and FOLDER then goes to a machine that has torch, numpy, a GPU, and
nothing else of tdpp's. The losses of the case `tiny` on this CPU go with it, for the GPU's to be compared with. With
`--megatron-core SITE`, which `pip install --no-deps --target SITE megatron-core packaging` made, its Python files go,
too.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.run import ITERATIONS, losses, python, run_folder
from benchmarks.images import photographs
from conf.compose import compose
from conf.schema.experiment import Experiment
from launch.commands.profile import prepare as prepare_profile
from launch.control.planning.plan import make_plan
from launch.profile.arguments import parse
from megatron_ext.contract.models.model import IMAGES
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import PROFILE
from megatron_ext.data.indexed_dataset import write_indexed

GPU = ("gpu@cluster.gpus.cpu=h100_80gb", "cluster.groups.local.gpus_per_node=1")
"""One machine with one H100; of an H200 only the memory is another."""
DOCUMENTS, PICTURES = 8, 64
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
PROFILE_S = 6
"""Seconds at most of a micro-batch size."""


@dataclass(frozen=True)
class Case:
    """A model and how it trains: micro-batch size, micro-batches an iteration, and what else its plan says."""

    model: str
    micro: int
    micro_batches: int
    overrides: tuple[str, ...] = ()
    precision: str = "bf16"
    iterations: int = ITERATIONS


@dataclass(frozen=True)
class ProfileCase:
    """A model that is profiled, and the cases that are predicted from it."""

    model: str
    overrides: tuple[str, ...]
    predicted: tuple[str, ...]
    precision: str = "bf16"


GPT2_124M = ("model.layers=12", "model.hidden=768", "model.heads=12")
GPT2_XL = ("model.heads=25",)
AUGMENTED = (
    *("data.augment.flip=true", "data.augment.rand_augment=2", "data.augment.erasing=0.25"),
    *("data.augment.mixup=0.8", "data.augment.cutmix=1.0"),
)
CASES = {
    "tiny": Case("tiny", 2, 2, precision="fp32", iterations=20),
    "gpt2-124m": Case("small", 8, 4, GPT2_124M),
    "gpt2-124m-micro-4": Case("small", 4, 8, GPT2_124M),
    "gpt2-124m-dropout": Case("small", 8, 4, (*GPT2_124M, *DROPOUT)),
    # The loss scale begins at 2^32, and halves in each iteration until gradients are finite.
    "gpt2-124m-fp16": Case("small", 8, 4, GPT2_124M, "fp16", ITERATIONS + 20),
    "gpt2-124m-recompute": Case("small", 8, 4, (*GPT2_124M, "parallel.recompute=full")),
    "gpt2-124m-2-streams": Case("small", 8, 4, (*GPT2_124M, "parallel.streams=2")),
    "gpt2-124m-4-streams": Case("small", 8, 4, (*GPT2_124M, "parallel.streams=4")),
    "gpt2-xl": Case("xl", 4, 4, GPT2_XL),
    "gpt2-xl-micro-2": Case("xl", 2, 8, GPT2_XL),
    "llama-1b": Case("llama-1b", 1, 4),
    "llama-1b-micro-2": Case("llama-1b", 2, 2),
    "vit-b16": Case("vit-b16", 64, 4, AUGMENTED),
    "vit-b16-2-streams": Case("vit-b16", 64, 4, (*AUGMENTED, "parallel.streams=2")),
    "vit-b16-4-streams": Case("vit-b16", 64, 4, (*AUGMENTED, "parallel.streams=4")),
    "resnet50": Case("resnet50", 64, 4, AUGMENTED),
}
PROFILES = {
    "profile-gpt2-124m": ProfileCase("small", GPT2_124M, ("gpt2-124m", "gpt2-124m-micro-4")),
    "profile-gpt2-xl": ProfileCase("xl", GPT2_XL, ("gpt2-xl", "gpt2-xl-micro-2")),
    "profile-llama-1b": ProfileCase("llama-1b", (), ("llama-1b", "llama-1b-micro-2")),
}


def experiment_of(case: Case, data: Path = Path("data"), *more: str) -> Experiment:
    """A run of a case on one GPU, with its data in this folder."""
    return compose(
        [
            *GPU,
            "parallel=single",
            f"model={case.model}",
            f"parallel.micro_batch_size={case.micro}",
            f"parallel.global_batch_size={case.micro * case.micro_batches}",
            "train=gpt2",
            f"train.iterations={case.iterations}",
            "train.lr_warmup_iterations=2",
            "train.log_interval=1",
            f"train.precision={case.precision}",
            "train.checkpoint=false",
            "train.comm_timeout_s=600",
            f"data.prefix={data / case.model}",
            "data.split='1,0,0'",
            *case.overrides,
            *more,
        ]
    )


def profile_of(case: ProfileCase, cases: Mapping[str, Case]) -> Experiment:
    """A job as `tdpp profile` submits it, for the micro-batch sizes of the cases that are predicted."""
    sizes = ",".join(str(cases[name].micro) for name in case.predicted)
    words = [*GPU, f"model={case.model}", f"train.precision={case.precision}", *case.overrides]
    return prepare_profile(parse([*words, f"micro_batches={sizes}", f"seconds={PROFILE_S}"])).experiment


def prepare(folder: Path, cases: Mapping[str, Case], profiles: Mapping[str, ProfileCase]) -> None:
    """Writes FOLDER/CASE/plan.json, with request.json of a profile, and in FOLDER/data random tokens of a model's
    vocabulary, or images."""
    data = folder / "data"
    data.mkdir(parents=True)
    plans: dict[str, list[Plan]] = defaultdict(list)
    for name, case in cases.items():
        plan = make_plan(experiment_of(case, data), name)
        _write(folder / name, plan)
        plans[case.model].append(plan)
    for model, alike in plans.items():
        write_data(data / model, alike)
    for name, of in profiles.items():
        experiment = profile_of(of, cases)
        _write(folder / name, make_plan(experiment, name))
        (folder / name / "request.json").write_text(experiment.cluster.environment[PROFILE])
    if "tiny" in cases:
        with run_folder(folder / "tiny", "cpu", {}) as path:
            python(["-m", "megatron_ext.worker", path, "0"])
            (folder / "tiny" / "losses.json").write_text(json.dumps(losses(path)))


def _write(folder: Path, plan: Plan) -> None:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan.as_json()))


def write_data(prefix: Path, plans: Sequence[Plan]) -> None:
    """Enough for each of these plans of one model."""
    model = plans[0].model
    if model.traits.learns == IMAGES:
        assert model.image_size is not None
        photographs(prefix, PICTURES, model.image_size)
        return
    samples = max(plan.train.iterations * plan.global_batch_size for plan in plans) + DOCUMENTS
    dtype = np.dtype(np.uint16 if model.vocab_size <= 2**16 else np.int32)
    size = samples * (model.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, size, dtype=dtype)
    write_indexed(prefix, np.array_split(tokens, DOCUMENTS), dtype)


def copy_megatron_core(site: Path, folder: Path) -> None:
    """What of it is Python's, which any version of Python takes, with the package that it needs beside torch."""
    for package in ("megatron", "packaging"):
        for path in (site / package).rglob("*.py"):
            to = folder / "site" / path.relative_to(site)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="is made anew")
    parser.add_argument("--megatron-core", type=Path, metavar="SITE")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    prepare(folder, CASES, PROFILES)
    if arguments.megatron_core:
        copy_megatron_core(arguments.megatron_core, folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {len(CASES)} cases and {len(PROFILES)} profiles, {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
