"""A driver's file (`pipedream=vgg16_4pipedream.yml`) as words of the command line (docs/pipedream-driver.md)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.pipedream import WORD, ModelOf, placement, stages
from conf.pipedream import driver as driver_file
from conf.pipedream.driver import Driver, ModelType, Policy, Reading
from conf.pipedream.placement import Placement
from conf.reading.user_files import choices
from conf.reading.words import in_word
from conf.schema.model import Model
from conf.schema.train import LENGTHS
from megatron_ext.contract.models.model import IMAGES, PAIRS

MODELS = {"vgg16": "vgg16", "resnet50": "resnet50", "alexnet": "alexnet", "gnmt": "gnmt", "gnmt_large": "gnmt-16"}
"""tdpp's configuration, by the name that a module has in PipeDream."""
MOST_TOKENS = 50
"""Tokens of a sentence that PipeDream trains on, at most."""


def words_of(path: Path, given: tuple[str, ...], model_of: ModelOf) -> tuple[list[str], list[str]]:
    """Return the words of a configuration, as a `Reader` of conf/foreign_files.py does."""
    said, notes = _read(path, given, model_of)
    groups = {word.partition("=")[0] for word in given}
    return [
        f"{key}={in_word(value)}"
        for key, value in said.items()
        if not (key.lstrip("+").partition(".")[0] in groups - {"name", "runs_dir"} or key in groups)
    ], notes


def _read(path: Path, given: tuple[str, ...], model_of: ModelOf) -> tuple[dict[str, Any], list[str]]:
    driver = driver_file.read(path)
    reading = Reading(driver, given)
    if reading.has("experiment"):
        raise ConfigError(f"{WORD}{path} is a whole experiment, like experiment=…; give only one of them")
    model = _model(path, reading, model_of)
    placed = _placement(path, driver)
    _layout(path, placed, model, reading)
    add(reading)
    if reading.refused:
        raise ConfigError(
            f"{WORD}{path} cannot be trained unchanged:" + "".join(f"\n  {one}" for one in reading.refused)
        )
    unknown = [f"unknown to tdpp, so ignored: {', '.join(driver.unknown)}"] if driver.unknown else []
    return reading.words, [*reading.notes, *unknown]


def _model(path: Path, reading: Reading, model_of: ModelOf) -> Model:
    driver, words = reading.driver, reading.words
    words["name"] = re.sub(r"[^\w.+-]", "_", path.stem).lstrip(".-") or "pipedream"
    words["runs_dir"] = driver.log_directory
    reading.notes.append(
        f"runs go to {driver.log_directory}: other commands find them with --runs-dir or TDPP_RUNS_DIR"
    )
    parts = driver.module.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    chosen = [word for word in reading.given if word.lstrip("+").startswith(("model=", "model."))]
    if not reading.has("model"):
        own = [choice for choice in choices("model", reading.given) if re.sub(r"\W", "_", choice) == name]
        if name not in MODELS and len(own) != 1:
            raise ConfigError(
                f"{WORD}{path}: module={driver.module}: {name} is not a known model ({', '.join(MODELS)}); give "
                f"model=… and parallel.partition=…"
            )
        words["model"] = MODELS[name] if name in MODELS else own[0]
        if driver.kind is ModelType.translation and name.startswith("gnmt"):
            words["model.untie_embeddings_and_output_weights"] = True
            words |= {"model.sequence_length": MOST_TOKENS, "model.decoder_sequence_length": MOST_TOKENS}
        chosen = [f"{key}={in_word(value)}" for key, value in words.items() if key.startswith("model")] + chosen
    model = model_of(chosen)
    wanted = IMAGES if driver.kind is ModelType.images else PAIRS
    if model.traits.learns != wanted and not model.traits.user_code:
        reading.refused.append(f"model_type={driver.kind}: model={model.name} is of model.family={model.family}")
    return model


def _found(path: Path, name: str, kind: ModelType) -> Path | None:
    """A file or folder that a driver's file names from the folder of its model's type (runtime/translation)."""
    folders = [folder for base in [path.absolute().parent, Path.cwd()] for folder in (base, *base.parents)]
    tried = [place / name for folder in folders for place in (folder, folder / kind, folder / "runtime" / kind)]
    return next((one for one in tried if one.exists()), None)


def _placement(path: Path, driver: Driver) -> Placement:
    if driver.config_file is None:
        if len(driver.machines) > 1:
            raise ConfigError(
                f"{WORD}{path}: config_file is missing, so there is one rank, but machines has "
                f"{len(driver.machines)}; give a file with stages and ranks, or one machine"
            )
        return placement.placed((0, 0), (1,))
    said = f"{WORD}{path}: config_file"
    file = _found(path, driver.config_file, driver.kind)
    if file is None:
        raise ConfigError(
            f"{said}={driver.config_file}: no such file beside the configuration, in a folder above it or in "
            f"{driver.kind}/ there; give its path"
        )
    found = placement.read(file, said)
    if (ranks := sum(found.replicas)) > len(driver.machines):
        raise ConfigError(
            f"{said}={driver.config_file} has {ranks} ranks, but machines has {len(driver.machines)} GPUs; give a "
            "machine for each rank"
        )
    return found


def _layout(path: Path, placed: Placement, model: Model, reading: Reading) -> None:
    """Stages and machines."""
    driver, words = reading.driver, reading.words
    counts = _blocks(path, placed, model, reading)
    kept = _with_blocks(counts, model)
    if len(kept) < len(counts):
        empty = [str(stage) for stage in range(len(counts)) if stage not in kept]
        reading.notes.append(f"stage {', '.join(empty)} has nothing to train and is left out with its ranks")
        placed = Placement(
            placed.modules,
            tuple(placed.ranks[stage] for stage in kept),
            None if placed.depth is None else tuple(placed.depth[stage] for stage in kept),
        )
        counts = [counts[stage] for stage in kept]
    hosts, notes = placement.ordered(driver.machines, placed)
    where, more = placement.words(hosts)
    words |= where
    groups = {"executor", "cluster"}
    reading.notes += [*notes, *(more if not any(map(reading.has, groups)) else [])]
    replicas = placed.replicas
    batch = int(reading.number("parallel.micro_batch_size", driver.batch_size))
    words |= {"parallel": "single", "parallel.micro_batch_size": batch}
    words["parallel.global_batch_size"] = batch * replicas[0]
    words["parallel.recompute"] = "full" if driver.recompute else "none"
    if len(replicas) == 1:
        words["parallel.data"] = replicas[0]
        return
    words |= {"parallel.pipeline": len(replicas), "parallel.partition": "-".join(map(str, counts))}
    words |= {"parallel.replicas": "-".join(map(str, replicas)), "parallel.schedule": "pipedream"}
    words["parallel.compress"] = "int8" if driver.compress_activations else "none"
    if reading.has("parallel.schedule"):
        return
    depth = (0,) * len(replicas) if driver.no_input_pipelining else placed.depth
    if depth is not None:
        words["parallel.depth"] = "-".join(map(str, depth))
    if driver.macrobatch:
        words["parallel.update_every"] = 2


def _blocks(path: Path, placed: Placement, model: Model, reading: Reading) -> list[int]:
    """Count the model's blocks of each stage."""
    if len(placed.ranks) == 1:
        return [model.counted]
    if reading.has("parallel.partition") or reading.has("parallel"):  # which then stands
        return [1] * len(placed.ranks)
    if placed.partition is not None:
        return list(placed.partition)
    driver = reading.driver
    package = _found(path, driver.module.replace(".", "/"), driver.kind)
    fitting = "give parallel.partition=… for another one"
    if package is not None and model.family in stages.KNOWN:
        try:
            counts = stages.from_modules(package, placed, str(model.family))
        except ConfigError as error:
            reading.notes.append(f"{error}; the partition is found without it")
        else:
            if sum(counts) != model.counted:
                raise ConfigError(
                    f"{WORD}{path}: module={driver.module} has {sum(counts)} layers that are blocks in tdpp, but "
                    f"{model.blocks}; give the right model, or parallel.partition=…"
                )
            if model.traits.pipedream_kernel > 1:
                reading.notes.append(
                    "PipeDream cuts bottlenecks in two; tdpp puts each on the stage of its 3 x 3 convolution"
                )
            return counts
    counts = stages.by_operations(model, placed.replicas)
    reading.notes.append(
        f"the stages of {driver.module} are not beside the file, so the partition {'-'.join(map(str, counts))} "
        f"balances the operations of a forward pass; {fitting}"
    )
    return counts


def _with_blocks(counts: Sequence[int], model: Model) -> list[int]:
    """The stages that have something to train; embedding and head are on the first and the last one."""
    ends = () if model.measured else (0, len(counts) - 1)
    return [stage for stage, count in enumerate(counts) if count or stage in ends]


WARMUP_EPOCHS, STEP_EPOCHS, DECAY = 5, 30, 0.97
BUCKETING = 80
SYNTHETIC_IMAGES = 1_000_000
"""Images of an epoch."""


def add(reading: Reading) -> None:
    """The words of the groups train, data and container."""
    _training(reading)
    _data(reading)


def _training(reading: Reading) -> None:
    driver, words = reading.driver, reading.words
    if driver.kind is ModelType.images:
        words |= {"train.optimizer": "sgd", "train.momentum": 0.9}
    else:
        words |= {"train.optimizer": "adam", "train.adam_beta1": 0.9, "train.adam_beta2": 0.999}
    words |= {"train.weight_decay": driver.weight_decay, "train.clip_grad": 0.0}
    words["train.log_interval"] = driver.print_frequency
    if not any(reading.has(f"train.{key}") for key in LENGTHS):
        words |= {"train.iterations": None, "train.epochs": driver.epochs}
    words |= {"train.lr": driver.learning_rate, "train.lr_warmup_iterations": 0, "train.min_lr": 0.0}
    _policy(reading)
    each = "an epoch has as many iterations as samples divided by parallel.global_batch_size"
    if driver.lr_warmup and not reading.has("train.lr_warmup_iterations"):
        reading.refused.append(
            f"lr_warmup=True: the warm-up lasts {WARMUP_EPOCHS} epochs; give train.lr_warmup_iterations=… ({each})"
        )
    for key in () if driver.synthetic_data else ("save_interval", "eval_interval"):
        if not reading.has(f"train.{key}"):
            words[f"train.{key}"] = "1epoch"
    words["train.keep_checkpoints"] = driver.epochs
    if driver.verbose_frequency:
        reading.notes.append("verbose_frequency has no effect: a run records every pass, and tdpp report shows them")
    if driver.compress_activations and "parallel.compress" in words:
        reading.notes.append(
            "compress_activations: stages send activations and their gradients in 8 bits; PipeDream's own driver reads "
            "this key and compresses nothing, so its losses are those of parallel.compress=none"
        )
    elif driver.compress_in_gpu:
        reading.notes.append("compress_in_gpu has no effect without compress_activations between several stages")
    if driver.macrobatch and "parallel.update_every" in words:
        reading.notes.append(
            "macrobatch: stages update after two rounds; parallel.semantics=two with an update_every of at least the "
            "first stage's depth keeps two versions at most"
        )


def _policy(reading: Reading) -> None:
    driver, words = reading.driver, reading.words
    if reading.has("train.lr_policy"):
        return
    if driver.learning_rate_policy is Policy.polynomial:
        words |= {"train.lr_policy": "polynomial", "train.lr_power": 2.0}
    elif driver.learning_rate_policy is Policy.exponential_decay:
        words |= {"train.lr_policy": "linear", "train.min_lr": DECAY * reading.number("train.lr", driver.learning_rate)}
    elif driver.epochs <= STEP_EPOCHS:
        words["train.lr_policy"] = "constant"
    else:
        words |= {"train.lr_policy": "step", "train.lr_gamma": 0.1}
        if not reading.has("train.lr_step_iterations"):
            reading.refused.append(
                f"learning_rate_policy=step: the rate falls every {STEP_EPOCHS} epochs; give that many epochs in "
                f"iterations, train.lr_step_iterations=…, or another train.lr_policy"
            )


def _data(reading: Reading) -> None:
    driver, words = reading.driver, reading.words
    words |= {"container": "docker", "container.image": driver.container}
    images = driver.kind is ModelType.images
    name = Path(driver.data_dir).name or "pipedream"
    words["data.prefix"] = f"data/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"
    if images:
        words["data.augment.flip"] = True
    else:
        words["data.bucketing"] = BUCKETING
    made = f"prepare its data ({driver.data_dir}) with tdpp data {'images' if images else 'pairs'}"
    if driver.synthetic_data and images:
        words["data.prefix"] = "data/synthetic"
        if "train.epochs" in words:
            words["train.samples"] = words.pop("train.epochs") * SYNTHETIC_IMAGES
        made = "synthetic_data: use any images, such as tdpp data images --source digits --size 224 --channels 3"
    elif driver.synthetic_data:
        reading.notes.append("synthetic_data has no effect on translation (in PipeDream neither)")
    if not (reading.has("data") or reading.has("data.prefix")):
        reading.notes.append(f"{made} --output {words['data.prefix']}")
