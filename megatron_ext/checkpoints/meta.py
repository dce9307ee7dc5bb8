"""What a checkpoint tells of itself, without its tensors: it needs Python alone (docs/formats.md)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from megatron_ext.contract.adaptive.config import Adapted
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular, why
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan_check import PlanFault, build, check_object, require
from megatron_ext.contract.run_files import BEST, CHECKPOINTS, LATEST, META
from megatron_ext.contract.train_config import ADAMW, OPTIMIZERS
from megatron_ext.data.samples import Position

VERSION = 2
SCALER = ("scale", "good", "patience")


@dataclass(frozen=True)
class Meta:
    """`meta.json`: all of a checkpoint but its tensors."""

    iteration: int
    consumed_samples: int
    updates: int
    """Updates of the weights; without any there need not be Adam's moments."""
    scaler: Optional[Dict[str, float]]
    """Of fp16's loss scale."""
    order: Optional[Dict[str, float]]
    """`Samples.order` of the run; None if no sample was consumed."""
    model: Dict[str, object]
    """`ModelConfig.identity`."""
    optimizer: str = ADAMW
    """Whose state it has; not written where it is AdamW's."""
    evaluation: Optional[Dict[str, float]] = None
    """What an evaluation of these weights gave, as far as it is finite; not written without one."""
    adaptation: Optional[Adapted] = None
    """Of a batch that adapts, or shares that do; not written without."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Meta:
        """From JSON, as `as_json` has it but for the version.

        Raises:
            TypeError, PlanFault: it has other keys, or wrong values.
        """
        meta = cls(**content)
        check_object(cls, content, "", whole=False)
        if meta.adaptation is None:
            return meta
        require(content["adaptation"], ("micro_batch_size", "shares", "window"), "adaptation")
        return replace(meta, adaptation=build(Adapted, content["adaptation"]))

    def config(self) -> ModelConfig:
        """The model, without padding of its vocabulary.

        Raises:
            EngineError: `model` is not one that this engine knows.
        """
        content = {**self.model, "padded_vocab_size": self.model.get("vocab_size")}
        try:
            check_object(ModelConfig, content, "model", whole=True)
        except PlanFault as error:
            raise EngineError(f"meta.json of a model that this engine does not know: {error}") from error
        config: ModelConfig = build(ModelConfig, content)
        return config

    def as_json(self) -> str:
        content = {"version": VERSION, **asdict(self)}
        if self.optimizer == ADAMW:
            del content["optimizer"]
        for key in ("evaluation", "adaptation"):
            if content[key] is None:
                del content[key]
        return json.dumps(content, indent=1) + "\n"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    meta: Meta

    @property
    def position(self) -> Position:
        return Position(self.meta.iteration, self.meta.consumed_samples)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """The checkpoint in `folder`, of which only meta.json is read.

        Raises:
            EngineError: it is not there, or not one that this engine understands.
        """
        path = folder / META
        try:
            content = json.loads(read_regular(path))
        except (OSError, ValueError, RecursionError) as error:
            raise EngineError(f"{path}: cannot be read as a checkpoint's description: {why(error)}") from error
        version = content.pop("version", None) if isinstance(content, dict) else None
        if version != VERSION:
            raise EngineError(f"{path}: expected a checkpoint of version {VERSION}, found version {version}")
        try:
            meta = Meta.of(content)
            check_object(ModelConfig, meta.model, "model", whole=False)
            require(meta.scaler or dict.fromkeys(SCALER), SCALER, "scaler")
        except (TypeError, PlanFault) as error:
            raise EngineError(f"{path}: damaged: expected the keys of version {VERSION}: {error}") from error
        for key in ("iteration", "consumed_samples", "updates"):
            if content[key] < 0:
                raise EngineError(f"{path}: damaged: {key}={content[key]} must be at least 0")
        if meta.optimizer not in OPTIMIZERS:
            raise EngineError(f"{path}: damaged: optimizer={meta.optimizer!r} must be one of {', '.join(OPTIMIZERS)}")
        return cls(folder, meta)

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """The newest one of a run folder or its checkpoints folder, or that in the folder itself.

        `path` may also be a file `best` or `latest` in a checkpoints folder, and then is the one that it names.

        Raises:
            EngineError: there is none.
        """
        for folder in (path / CHECKPOINTS, path):
            latest = folder / LATEST
            if latest.is_file():
                return cls.read(folder / _named(latest))
        if path.name in (LATEST, BEST) and path.is_file():
            return cls.read(path.parent / _named(path))
        if (path / META).is_file():
            return cls.read(path)
        raise EngineError(
            f"{path}: no checkpoint found; give a run folder, its checkpoints folder, or a folder with a meta.json"
        )

    def part(self, name: str) -> Path:
        """The file of a part."""
        return part_file(self.folder, name)


def _named(latest: Path) -> str:
    """The name of a checkpoint, beside which the file `latest` or `best` lies."""
    try:
        name = read_regular(latest).decode("utf-8").strip()
    except (OSError, ValueError) as error:
        raise EngineError(f"{latest}: cannot be read as the name of a checkpoint: {why(error)}") from error
    if not (re.fullmatch(r"[\w.-]{1,200}", name) and (latest.parent / name).is_dir()):
        raise EngineError(f"{latest}: names {name[:80]!r}, but no such checkpoint exists; write one that is")
    return name


def part_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


def part_name(block: str) -> str:
    """The part that holds a block: `layer-00007` for `layers.7`, `decoder-00003` for `decoder.3`."""
    stem, _, number = block.rpartition(".")
    if not (stem and number.isdigit()):
        return block
    return f"{'layer' if stem == 'layers' else stem}-{int(number):05d}"


def part_names(layers: int) -> List[str]:
    """All parts of a GPT model."""
    return ["embedding", *(part_name(f"layers.{number}") for number in range(layers)), "head"]


def require_model(found: Checkpoint, model: Mapping[str, object]) -> None:
    """Raises EngineError if a checkpoint is of another model than this one, which has the keys of `Meta.model`."""
    other = found.meta.model
    keys = [key for key in dict.fromkeys([*model, *other]) if model.get(key) != other.get(key)]
    if keys:
        raise EngineError(
            f"{found.folder}: a checkpoint of another model: expected "
            + ", ".join(f"{key}={model.get(key)}" for key in keys)
            + "; found "
            + ", ".join(f"{key}={other.get(key)}" for key in keys)
            + "; give the run the same model, "
            + " ".join(f"model.{key}={value}" for key, value in other.items())
            + ", or load another checkpoint"
        )


def require_optimizer(found: Checkpoint, optimizer: str) -> None:
    """Raises EngineError if a checkpoint has the state of another optimizer than this one."""
    if found.meta.updates and found.meta.optimizer != optimizer:
        raise EngineError(
            f"{found.folder}: has the state of train.optimizer={found.meta.optimizer}, which train.optimizer="
            f"{optimizer} cannot continue with; use train.optimizer={found.meta.optimizer}, or take the weights "
            f"alone, by "
            "export and import with python -m megatron_ext.hf"
        )


def to_load(path: Path, model: Mapping[str, object], iterations: Optional[int], optimizer: str) -> Checkpoint:
    """The checkpoint that a new run of `iterations` in all, as far as they are known, goes on from, where `train.load`
    is `path`.

    Raises:
        EngineError: there is none, or it is of another model or optimizer, or leaves nothing to train.
    """
    try:
        found = Checkpoint.at(path)
        require_model(found, model)
        require_optimizer(found, optimizer)
    except EngineError as error:
        told = str(error)  # which may begin with the path
        raise EngineError(f"train.load={told if told.startswith(f'{path}: ') else f'{path}: {told}'}") from error
    except OSError as error:
        raise EngineError(f"train.load={path}: {error.filename} cannot be read: {error.strerror}") from error
    if iterations is not None and found.meta.iteration >= iterations:
        raise EngineError(
            f"train.load={path}: {found.folder.name} is of iteration {found.meta.iteration} and "
            f"train.iterations={iterations}: nothing is left to train; use more iterations"
        )
    return found
