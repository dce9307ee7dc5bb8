"""A folder that from_pretrained of transformers loads, of a run's checkpoint in any layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Dict, Iterator, Optional

from torch import Tensor

from megatron_ext.checkpoints.converting import new_folder, weights_of
from megatron_ext.checkpoints.foreign import hf_weights
from megatron_ext.checkpoints.header import part_name
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.checkpoints.part_tensors import read_part
from megatron_ext.checkpoints.published import is_published
from megatron_ext.checkpoints.tensors import STATE
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import digest_of_file, why
from megatron_ext.contract.models.hf_config import config_file
from megatron_ext.contract.plan import Plan
from megatron_ext.families.tasks import task_of

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
