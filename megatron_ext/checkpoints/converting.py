"""A run's weights as other programs, or another run, load them: in the layouts of Hugging Face and Megatron-Core, or in
folders that from_pretrained of transformers loads."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Callable, Dict, Iterator, Optional, Tuple, Union

from torch import Tensor

from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.foreign import hf_weights, megatron_names
from megatron_ext.checkpoints.foreign.hf_files import taken
from megatron_ext.checkpoints.foreign.megatron_names import Weights
from megatron_ext.checkpoints.foreign.megatron_optimizer import Reached, training_of
from megatron_ext.checkpoints.header import of_part, part_file, part_name, part_names
from megatron_ext.checkpoints.meta import Checkpoint, Meta, written
from megatron_ext.checkpoints.part_tensors import read_part
from megatron_ext.checkpoints.published import is_published
from megatron_ext.checkpoints.tensors import STATE
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import digest_of_file, why
from megatron_ext.contract.models.hf_config import config_file
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import META, WEIGHTS
from megatron_ext.families.tasks import task_of

HUGGINGFACE, MEGATRON, TDPP = "huggingface", "megatron", "tdpp"
Content = Callable[[str], Dict[str, Tensor]]
"""Gives the tensors of a part, each named by its kind and parameter."""
ContentOfKind = Callable[[str, str], Dict[str, Tensor]]
"""Gives a part's tensors of a kind."""


def convert(
    source: Union[Checkpoint, Weights], to: str, out: Path, kind: str = WEIGHTS, plan: Optional[Plan] = None
) -> None:
    """Makes the new folder `out` of the weights of this kind: of a GPT-2, Llama or Mixtral, or of TDPP a checkpoint of
    any model, which also keeps the optimizer's state. For MEGATRON it is kept if `plan` says how the run trains, and
    the weights are not an average.

    Raises:
        EngineError: the source is damaged, the layout has no such model, or `out` is there or cannot be written.
            Nothing is then left of it.
    """
    if to == TDPP and not isinstance(source, Checkpoint):
        new_checkpoint(out, _meta_of(source), lambda part: _tensors_of(source, part))
        return
    with new_folder(out) as partial:
        if to == HUGGINGFACE:
            model, content = _content(source)
            hf_weights.save(partial, model, lambda part: content(part, kind))
        elif to == MEGATRON:
            training = None
            if plan is not None and kind == WEIGHTS and isinstance(source, Checkpoint):
                meta = source.meta
                training = training_of(plan, Reached(meta.iteration, meta.consumed_samples, meta.updates, meta.scaler))
            megatron_names.save(partial, *_content(source), kind, training)
        elif isinstance(source, Checkpoint):
            for part in source.parts():
                read_part(source, part)  # which compares checksums
                shutil.copyfile(source.part(part), part_file(partial, part))
            shutil.copyfile(source.folder / META, partial / META)


def _content(source: Union[Checkpoint, Weights]) -> Tuple[ModelConfig, ContentOfKind]:
    if isinstance(source, Checkpoint):
        return source.meta.config(), lambda part, kind: weights_of(source, part, kind)
    return source.model, lambda part, _: source.part(part)


def _meta_of(source: Weights) -> Meta:
    """What a checkpoint says that continues the training of Megatron-Core; with weights alone it begins one."""
    meta, reached = Meta.beginning(source.model.identity()), source.reached
    if reached is None:
        return meta
    return replace(
        meta,
        iteration=reached.iteration,
        consumed_samples=reached.consumed_samples,
        updates=reached.updates,
        scaler=reached.scaler,
        optimizer=reached.optimizer,
    )


def _tensors_of(source: Weights, part: str) -> Dict[str, Tensor]:
    return {f"{kind}/{name}": tensor for kind in source.kinds for name, tensor in source.part(part, kind).items()}


def weights_of(checkpoint: Checkpoint, part: str, kind: str) -> Dict[str, Tensor]:
    """The tensors of this kind in a part of a GPT's checkpoint; raises EngineError if one is missing or damaged."""
    model, found = checkpoint.meta.config(), read_part(checkpoint, part)
    names = model.traits.parameters(model, "layer" if part.startswith("layer-") else part)
    tied = model.traits.tied(model)
    return {
        name: taken(checkpoint.part(part), found, f"{kind}/{name}") for name in names if f"{part}.{name}" not in tied
    }


def new_checkpoint(folder: Path, meta: Meta, content: Content) -> Checkpoint:
    """Makes a checkpoint of a GPT in the new `folder`; raises EngineError as `new_folder` does."""
    names = part_names(meta.config().layers)
    with new_folder(folder) as partial:
        for part in names:
            safetensors.write(part_file(partial, part), content(part), of_part(part, meta.iteration))
        meta = replace(meta, parts=written(partial, names, meta.iteration))
        (partial / META).write_text(meta.as_json(), encoding="utf-8")
    return Checkpoint(folder, meta)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` once the block has ended. Raises EngineError: `out` is there, or cannot be written.
    Nothing is then left of it."""
    if out.exists():
        raise EngineError(f"{out}: is there already; give a new folder")
    partial = out.with_name(f".{out.name}.partial")
    try:
        try:
            partial.mkdir(parents=True)
            yield partial
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # renamed, or not to be kept
    except OSError as error:
        raise EngineError(f"{out}: cannot be written: {why(error)}") from error


BESIDE = (
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "generation_config.json"),
)
"""Files of a model's folder that say how it is used."""


def publish(plan: Plan, checkpoint: Checkpoint, out: Path, kind: str, adapters: bool = False) -> Optional[Path]:
    """Makes the new folder `out` of a run's checkpoint: the weights of this kind in fp32, config.json, and the files
    for tokens and generation of the folder that the run's model came from. Returns that folder, if it has any.

    `adapters`: those alone, instead of the whole model with them added.

    Raises:
        EngineError: the checkpoint is damaged, the model's config.json has changed since the run, or `out` is there
            or cannot be written. Nothing is then left of it.
    """
    published = plan.model.traits.published
    if published:
        _require_config(plan)

    def content(block: str) -> Dict[str, Tensor]:
        part = read_part(checkpoint, part_name(block)).items()
        return {name.partition("/")[2]: one for name, one in part if name.partition("/")[0] in (kind, STATE)}

    with new_folder(out) as partial:
        if published:
            task_of(plan).publish(content, partial, adapters)
        else:  # tdpp's own GPT
            hf_weights.save(partial, checkpoint.meta.config(), lambda part: weights_of(checkpoint, part, kind))
        return _copied(plan, partial)


def _require_config(plan: Plan) -> None:
    path = Path(config_file(str(plan.model.config)))
    try:
        found = digest_of_file(path)
    except OSError as error:
        raise EngineError(
            f"model.config={plan.model.config}: {path} cannot be read: {why(error)}; the run's model is described by "
            "that file, so put it back there"
        ) from error
    if found != plan.model.code_digest:
        raise EngineError(
            f"model.config={plan.model.config}: {path} has changed since the run was launched, so it may describe "
            "another model; put back the file of then"
        )


def _copied(plan: Plan, out: Path) -> Optional[Path]:
    """The first folder of those that the run's model came from which has such files, once they are copied."""
    for folder in _sources(plan):
        beside = [path for pattern in BESIDE for path in sorted(folder.glob(pattern)) if path.is_file()]
        if beside:
            for path in beside:
                shutil.copyfile(path, out / path.name)
            return folder
    return None


def _sources(plan: Plan) -> Iterator[Path]:
    if plan.train.load is not None and is_published(Path(plan.train.load)):
        folder = Path(plan.train.load)
        yield folder if folder.is_dir() else folder.parent
    if plan.model.config is not None:
        yield Path(config_file(plan.model.config)).parent
