"""A translation model in one file: weights, sizes and tokenizer (docs/formats.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, Mapping, NamedTuple

from torch import Tensor

from megatron_ext.checkpoints import safetensors
from megatron_ext.contract.errors import EngineError

KIND, VERSION = "tdpp.translation", "1"


class Exported(NamedTuple):
    """What is needed to translate."""

    model: Mapping[str, object]
    """`ModelConfig.identity`."""
    weights: Mapping[str, Tensor]
    """Weights by their names in the model, fp32."""
    tokenizer: str
    """The content of a tokenizer.json."""


def write(path: Path, content: Exported) -> None:
    """Raises EngineError if the file cannot be written."""
    metadata = {"kind": KIND, "version": VERSION, "model": json.dumps(dict(content.model))}
    safetensors.write(path, dict(content.weights), {**metadata, "tokenizer": content.tokenizer})


def read(path: Path) -> Exported:
    """The same of a file. Raises EngineError: it cannot be read, is damaged, or is not an export."""
    weights = safetensors.read(path)
    metadata = safetensors.metadata(path)
    if metadata.get("kind") != KIND:
        raise EngineError(f"{path}: no model to translate with; make one with 'tdpp translate RUN --export FILE'")
    if metadata.get("version") != VERSION:
        raise EngineError(f"{path}: expected version {VERSION}, found {metadata.get('version')}; export it again")
    try:
        model: Dict[str, object] = json.loads(metadata["model"])
        return Exported(model, weights, metadata["tokenizer"])
    except (KeyError, ValueError) as error:
        raise EngineError(f"{path}: damaged: its model cannot be read ({error}); export it again") from error
