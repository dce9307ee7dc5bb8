"""What a checkpoint says of itself, and whether it is whole, without its tensors: it needs Python alone
(docs/formats.md)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from megatron_ext.checkpoints.foreign.torch_dist import is_torch_dist
from megatron_ext.checkpoints.foreign.weights import weights_at
from megatron_ext.checkpoints.header import Header, digest_of, part_file, part_name, read_header, require_part
from megatron_ext.checkpoints.published import is_published, tensors_of
from megatron_ext.contract.adaptive.config import Adapted
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular, why
from megatron_ext.contract.kept import Kept
from megatron_ext.contract.models.images import image_blocks
from megatron_ext.contract.models.keys import DEFAULT
from megatron_ext.contract.models.model import ModelConfig, defined_by_user, family_named
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault, build, check_object, require
from megatron_ext.contract.run_files import BEST, CHECKPOINTS, LATEST, META, checkpoint_iteration, checkpoint_name
from megatron_ext.contract.train_config import ADAMW, OPTIMIZERS, Adapters, Train
from megatron_ext.data.samples import Position

VERSION = 3
WITHOUT_CHECKSUMS = 2
"""The version before, which is read, too."""
CHECKSUM = "checksum"
"""The key in meta.json of the checksum of all other keys."""
SCALER = ("scale", "good", "patience")


@dataclass(frozen=True)
class Meta:
    """`meta.json`: all of a checkpoint but its tensors."""

    iteration: int
    consumed_samples: int
    updates: int
    """Updates of the weights; without any there need not be Adam's moments."""
    scaler: Optional[Dict[str, float]]
    """The state of fp16's loss scale."""
    order: Optional[Dict[str, float]]
    """`Samples.order` of the run; None if no sample was consumed, or by another program."""
    model: Dict[str, object]
    """`ModelConfig.identity`."""
    optimizer: str = ADAMW
    """Whose state it has; not written where it is AdamW's."""
    evaluation: Optional[Dict[str, float]] = None
    """What an evaluation of these weights gave, as far as it is finite; not written without one."""
    adaptation: Optional[Adapted] = None
    """The state of a batch that adapts, or of shares that do; not written without."""
    adapters: Optional[Adapters] = None
    """`Train.adapters` of the run; not written without."""
    parts: Optional[Dict[str, str]] = None
    """For the name of each part, the digest of its file's header, which has the checksum of the tensors. None until
    they are written, and in a checkpoint without checksums."""

    @classmethod
    def beginning(cls, model: Mapping[str, object]) -> Meta:
        """Returns that of weights with which a training of a model with this identity begins."""
        return cls(iteration=0, consumed_samples=0, updates=0, scaler=None, order=None, model=dict(model))

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Meta:
        """Reads JSON, as `as_json` has it but for the version and the checksum.

        Raises:
            TypeError, PlanFault: it has other keys, or wrong values.
        """
        meta = cls(**content)
        check_object(cls, content, "", whole=False)
        if meta.adapters is not None:
            meta = replace(meta, adapters=build(Adapters, content["adapters"]))
        if meta.adaptation is None:
            return meta
        require(content["adaptation"], ("micro_batch_size", "shares", "window"), "adaptation")
        return replace(meta, adaptation=build(Adapted, content["adaptation"]))

    def config(self) -> ModelConfig:
        """The model, without padding of its vocabulary. Raises EngineError: `model` is not one that this engine
        knows."""
        padded = {"padded_vocab_size": self.model["vocab_size"]} if "vocab_size" in self.model else {}
        content = {**self.model, **padded}
        try:
            check_object(ModelConfig, content, "model", whole=True)
        except PlanFault as error:
            raise EngineError(f"meta.json of a model that this engine does not know: {error}") from error
        return build(ModelConfig, content)

    def as_json(self) -> str:
        """meta.json, once the parts are written."""
        assert self.parts is not None
        content = {"version": VERSION, **asdict(self)}
        if self.optimizer == ADAMW:
            del content["optimizer"]
        for key in ("evaluation", "adaptation", "adapters"):
            if content[key] is None:
                del content[key]
        return json.dumps({**content, CHECKSUM: _checksum(content)}, indent=1) + "\n"

    def part_names(self) -> List[str]:
        """Returns the names of all parts; without checksums those that the model has, where its family decides that."""
        if self.parts is not None:
            return list(self.parts)
        return [] if defined_by_user(str(self.model.get("family"))) else _parts_of(self.config())


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, or in the memory of nodes."""

    folder: Path
    meta: Meta
    published: bool = False
    """Whether it is of weights alone, as others save them; then it has none of the parts."""
    kept: Optional[Kept] = None
    """What holds its parts, if that is the memory of nodes; `folder` is where it would lie on disk."""

    @classmethod
    def in_memory(cls, kept: Kept) -> Checkpoint:
        folder = kept.run.checkpoints / checkpoint_name(kept.at.iteration)
        return cls(folder, replace(Meta.of(kept.meta), parts=kept.parts), kept=kept)

    @property
    def described(self) -> str:
        """Where it is."""
        return str(self.folder) if self.kept is None else f"iteration {self.meta.iteration} in the memory of the nodes"

    @property
    def position(self) -> Position:
        return Position(self.meta.iteration, self.meta.consumed_samples)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """The checkpoint in `folder`, whose files are all there and belong to it. Their tensors are not read.

        Raises:
            EngineError: it is not there, is damaged, or not one that this engine understands. The message names the
                newest sound one beside it.
        """
        try:
            return cls._read(folder)
        except EngineError as error:
            raise EngineError(f"{error}{cls._way_out(folder.parent, folder.name)}") from error

    @classmethod
    def _read(cls, folder: Path) -> Checkpoint:
        found = cls(folder, _meta(folder / META))
        named = checkpoint_iteration(folder.name)
        if named not in (None, found.meta.iteration):
            raise EngineError(
                f"{folder / META}: not of this checkpoint: it is of iteration {found.meta.iteration}, the folder of "
                f"iteration {named}"
            )
        for part in found.parts():
            found.require(part, read_header(found.part(part)))
        return found

    def parts(self) -> List[str]:
        """The names of all its parts; where nobody wrote them down and a user's module decides them, of those there."""
        return self.meta.part_names() or [path.stem for path in sorted(self.folder.glob("*.safetensors"))]

    def require(self, part: str, header: Header) -> None:
        """Raises EngineError if a part's file with this header does not belong to the checkpoint."""
        parts = self.meta.parts
        if parts is not None and part not in parts:
            raise EngineError(f"{self.folder}: it has no {part}; its parts are {', '.join(parts)}")
        require_part(self.part(part), header, part, self.meta.iteration, None if parts is None else parts[part])

    @classmethod
    def _way_out(cls, checkpoints: Path, without: str = "") -> str:
        """Which checkpoint can be used in place of `without`, in words that follow those of the error."""
        numbers = {path: checkpoint_iteration(path.name) for path in checkpoints.glob("iter_*") if path.name != without}
        for path in sorted((one for one in numbers if numbers[one] is not None), key=lambda one: -(numbers[one] or 0)):
            try:
                return f"; the newest sound checkpoint there is {cls._read(path).folder}"
            except EngineError:
                continue
        return "; no other checkpoint there is sound" if numbers else ""

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """The newest one of a run folder or its checkpoints folder, or that in the folder itself.

        `path` may also be a file `best` or `latest` in a checkpoints folder, and then is the one that it names.

        Raises:
            EngineError: there is none, or it is damaged.
        """
        for folder in (path / CHECKPOINTS, path):
            latest = folder / LATEST
            if latest.is_file():
                return cls.read(folder / cls._named(latest))
        if path.name in (LATEST, BEST) and path.is_file():
            return cls.read(path.parent / cls._named(path))
        if (path / META).is_file():
            return cls.read(path)
        if checkpoint_iteration(path.name) is not None and path.is_dir():  # damaged, rather than something else
            return cls.read(path)
        raise EngineError(
            f"{path}: no checkpoint found; give a run folder, its checkpoints folder, or a folder with a meta.json"
            f"{cls._way_out(path / CHECKPOINTS) or cls._way_out(path)}"
        )

    @classmethod
    def _named(cls, latest: Path) -> str:
        """The name of a checkpoint, beside which the file `latest` or `best` lies."""
        try:
            name = read_regular(latest).decode("utf-8").strip()
        except (OSError, ValueError) as error:
            told = f"{latest}: cannot be read as the name of a checkpoint: {why(error)}"
            raise EngineError(f"{told}{cls._way_out(latest.parent)}") from error
        if not (re.fullmatch(r"[\w.-]{1,200}", name) and (latest.parent / name).is_dir()):
            raise EngineError(
                f"{latest}: names {name[:80]!r}, but no such checkpoint exists; write one that is"
                f"{cls._way_out(latest.parent)}"
            )
        return name

    def part(self, name: str) -> Path:
        """The file of a part."""
        return part_file(self.folder, name)


def _meta(path: Path) -> Meta:
    """What a meta.json says. Raises EngineError: it is not there, was changed since it was written, or is not one that
    this engine understands."""
    try:
        text = read_regular(path)
        content = json.loads(text)
        found = _checksum({key: value for key, value in content.items() if key != CHECKSUM})
        respelled = b"".join(text.split()) != "".join(json.dumps(content).split()).encode()
    except AttributeError:  # no JSON object
        content, found, respelled = {}, "", False
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path}: cannot be read as a checkpoint's description: {why(error)}") from error
    version = content.pop("version", None)
    if version == WITHOUT_CHECKSUMS and content.keys() & {CHECKSUM, "parts"}:
        raise EngineError(f"{path}: damaged or edited: version {WITHOUT_CHECKSUMS} has no checksums, but it has some")
    if version not in (VERSION, WITHOUT_CHECKSUMS):
        raise EngineError(f"{path}: expected a checkpoint of version {VERSION}, found version {version}")
    if version == VERSION and (expected := content.pop(CHECKSUM, None)) != found:
        raise EngineError(f"{path}: damaged or edited: expected the checksum {expected}, found {found}")
    if version == VERSION and respelled:  # 1e-05 as 1E-05: the same number, by a file that has changed
        raise EngineError(f"{path}: damaged or edited: a number or a text in it is not spelled as it was saved")
    try:
        meta = Meta.of(content)
        check_object(ModelConfig, meta.model, "model", whole=False)
        require(meta.scaler or dict.fromkeys(SCALER), SCALER, "scaler")
    except (TypeError, PlanFault) as error:
        raise EngineError(f"{path}: damaged: expected the keys of version {version}: {error}") from error
    if version == VERSION and meta.parts is None:
        raise EngineError(f"{path}: damaged: expected the keys of version {version}: parts is missing")
    for key in ("iteration", "consumed_samples", "updates"):
        if content[key] < 0:
            raise EngineError(f"{path}: damaged: {key}={content[key]} must be at least 0")
    if meta.optimizer not in OPTIMIZERS:
        raise EngineError(f"{path}: damaged: optimizer={meta.optimizer!r} must be one of {', '.join(OPTIMIZERS)}")
    return meta


def _checksum(content: Mapping[str, Any]) -> str:
    """Returns the checksum of what JSON says, however it is written."""
    return digest_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _parts_of(model: ModelConfig) -> List[str]:
    """All parts of a checkpoint of a model whose family decides them."""
    if blocks := image_blocks(model):
        return [part_name(block.name) for block in blocks]
    counted, names = [kind for kind, _ in model.kinds()], []
    for kind, count in model.all_kinds():
        names += [None if kind in counted else kind] * count
    numbers = iter(range(len(names)))
    return [part_name(name or model.block_name(next(numbers))) for name in names]


def written(folder: Path, parts: Sequence[str], iteration: int) -> Dict[str, str]:
    """`Meta.parts` of files that lie in `folder`. Raises EngineError: one is not what it should be."""
    headers = {part: read_header(part_file(folder, part)) for part in parts}
    for part, header in headers.items():
        require_part(part_file(folder, part), header, part, iteration, header.digest)
    return {part: header.digest for part, header in headers.items()}


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
            f"{found.folder}: has the state of train.optimizer={found.meta.optimizer}, which "
            f"train.optimizer={optimizer} cannot continue with; use train.optimizer={found.meta.optimizer}, or take "
            "the weights alone, by export and import with python -m megatron_ext.hf"
        )


def require_order(found: Checkpoint, order: Mapping[str, float]) -> None:
    """Raises EngineError if training cannot go on at a checkpoint's sample, because what is known of `Samples.order` is
    another one: for other data, or a number of samples that needs other epochs."""
    before = found.meta.order or order
    keys = [key for key in order if before.get(key) != order[key]]
    if found.meta.consumed_samples and keys:
        raise EngineError(
            f"{found.folder}: cannot continue at its sample {found.meta.consumed_samples}, because the samples come in "
            "another order: expected "
            + ", ".join(f"{key}={before.get(key)}" for key in keys)
            + "; found "
            + ", ".join(f"{key}={order[key]}" for key in keys)
            + ". Keep the data, data.split, train.seed, and as many samples (train.iterations x "
            "parallel.global_batch_size) as need the same epochs; or take the weights alone, by export and import with "
            "python -m megatron_ext.hf"
        )


def require_adapters(found: Checkpoint, adapters: Optional[Adapters]) -> None:
    """Raises EngineError if a checkpoint has other adapters than a run, which has these, or none where it has some."""
    has = found.meta.adapters
    if found.published or has == adapters or (has is None and adapters and _has_adapters(found)):
        return
    given, own = (_adapters_as_given(one) for one in (adapters, has))
    same = "leave train.lora_rank out" if has is None else "give the run the same"
    raise EngineError(
        f"{found.folder}: a checkpoint of other adapters: expected {given}; found {own}; {same}, or train.load the "
        "folder that tdpp checkpoint convert RUN --to huggingface FOLDER makes of it"
    )


def _adapters_as_given(adapters: Optional[Adapters]) -> str:
    """Returns the words of a command line that ask for them."""
    if adapters is None:
        return "none"
    targets = "null" if adapters.lora_targets is None else f"[{','.join(adapters.lora_targets)}]"
    return f"train.lora_rank={adapters.lora_rank} train.lora_alpha={adapters.lora_alpha} train.lora_targets={targets}"


def _has_adapters(found: Checkpoint) -> bool:
    """Whether there are some in a checkpoint that does not say so, as before 28 November 2026."""
    return any(name.endswith(".lora_A") for part in found.parts() for name in read_header(found.part(part)).entries)


def start_of(plan: Plan) -> Optional[Checkpoint]:
    """What a run goes on from when it starts: its own newest checkpoint, else `train.load`, else nothing. Raises
    EngineError: it cannot be used."""
    model = plan.model.identity()
    if plan.files.latest_checkpoint.is_file():
        found = Checkpoint.at(plan.files.checkpoints)
        require_model(found, model)
        require_optimizer(found, plan.train.optimizer)
        require_adapters(found, plan.train.adapters)
        return found
    if plan.train.load is None:
        return None
    return to_load(Path(plan.train.load), model, plan.train, plan.train.iterations)


def _published(path: Path, model: Mapping[str, object]) -> Checkpoint:
    """Weights that others saved as the beginning of a run. Raises EngineError: their files are not there or damaged, or
    the model's family does not read them."""
    family = str(model.get("family", DEFAULT))
    meta = Meta.beginning(model)
    if family_named(family).published:
        tensors_of(path)
    elif family_named(family).megatron_lm:
        meta = replace(meta, model=weights_at(path, meta.config()).model.identity())
    else:
        raise EngineError(
            f"{path}: model.family={family} does not read published weights; model.family=huggingface reads all of "
            "transformers"
        )
    return Checkpoint(path, meta, published=True)


def to_load(path: Path, model: Mapping[str, object], train: Train, iterations: Optional[int]) -> Checkpoint:
    """The checkpoint that a new run of `iterations` in all, as far as they are known, goes on from, where `train.load`
    is `path`: a checkpoint of ours, or weights that others saved.

    Raises:
        EngineError: there is none, or it is of another model, optimizer or adapters, or leaves nothing to train.
    """
    try:
        theirs = (
            is_published(path) or is_torch_dist(path) or (path / "config.json").is_file()
        )  # perhaps without weights
        found = _published(path, model) if theirs else Checkpoint.at(path)
        require_model(found, model)
        require_optimizer(found, str(train.optimizer))
        require_adapters(found, train.adapters)
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
