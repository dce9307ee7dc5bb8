"""Checkpoints to and from the layouts of Hugging Face's GPT-2, Llama, Mistral, Qwen 2 and Qwen 3.

    python -m megatron_ext.hf export CHECKPOINT OUT     CHECKPOINT: a run folder, its checkpoints folder or one of these
    python -m megatron_ext.hf import FROM CHECKPOINT    which train.load then takes

OUT and FROM are a folder with config.json and model.safetensors, or a file of that format alone; FROM may also have
its weights in shards, beside model.safetensors.index.json. Only weights cross.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from torch import Tensor

from megatron_ext.checkpoints import hf_files, hf_gpt2, hf_llama, safetensors
from megatron_ext.checkpoints.header import of_part
from megatron_ext.checkpoints.hf_files import taken
from megatron_ext.checkpoints.kept_weights import add_weights, kind_of, tell_kind
from megatron_ext.checkpoints.meta import Checkpoint, Meta, part_file, part_names, written
from megatron_ext.checkpoints.published import INDEX
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular
from megatron_ext.contract.models.counts import checkpoint_parameter
from megatron_ext.contract.models.model import OPTIONS, ModelConfig
from megatron_ext.contract.run_files import META, WEIGHTS
from megatron_ext.data.indexed_dataset import replacing

FAMILIES = {"gpt2": hf_gpt2, **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), hf_llama)}
"""The importer of each `model_type` of config.json."""


def export(checkpoint: Checkpoint, out: Path, kind: str = WEIGHTS) -> None:
    """Writes the weights of this kind to `out`: a file if its name ends with .safetensors, else a folder with
    config.json too.

    Raises:
        EngineError: the checkpoint is damaged, or `out` cannot be written.
    """
    tensors: Dict[str, Tensor] = {}
    model = checkpoint.meta.config()
    family = next((family for family in (hf_gpt2, hf_llama) if family.fits(model)), None)
    if family is None:
        options = ", ".join(f"model.{key}={value}" for key, value in model.identity().items() if key in OPTIONS)
        raise EngineError(
            f"{checkpoint.folder}: no GPT-2, Llama, Mistral or Qwen 2 or 3: {options}; only these are exported"
        )
    prefix = hf_gpt2.PREFIX if family is hf_gpt2 else ""
    for part in part_names(model.layers):
        content = safetensors.read_part(checkpoint, part)
        for name, twin in family.twins(model, part).items():
            tensor = taken(checkpoint.part(part), content, f"{kind}/{name}")
            pairs = twin.theirs(tensor, checkpoint_parameter(model, part, name))
            tensors.update({f"{prefix}{theirs}": each for theirs, each in pairs})
    as_file = out.suffix == ".safetensors"
    if not as_file:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"{out}: cannot be written: {error}") from error
    safetensors.write(out if as_file else out / "model.safetensors", tensors, {"format": "pt"})
    if not as_file:
        with replacing(out / "config.json") as file:
            file.write((json.dumps(family.config_of(model), indent=2) + "\n").encode())


def import_(
    source: Path, folder: Path, heads: Optional[int] = None, sequence_length: Optional[int] = None
) -> Checkpoint:
    """Makes a checkpoint of iteration 0 in the new `folder`.

    `heads` is needed for GPT-2's file without a config.json; `sequence_length` is a Llama's, if not the longest.

    Raises:
        EngineError: `source` is not a model that this engine computes, or `folder` is there or cannot be written.
            Nothing is then left of it.
    """
    config = _config(source.parent if source.name == INDEX else source)
    path, tensors = hf_files.read(source)
    kind = config.get("model_type") if config else "gpt2"
    if kind not in FAMILIES:
        expected = " or ".join(map(repr, FAMILIES))
        raise EngineError(f"{path.parent / 'config.json'}: expected model_type={expected}, found {kind!r}")
    family = FAMILIES[kind]
    if family is hf_llama:
        found, model = tensors, hf_llama.model_of(path, tensors, config, sequence_length)
    else:
        found = _without_prefix(path, tensors)
        model = hf_gpt2.model_of(path, found, config, heads)
    if folder.exists():
        raise EngineError(f"{folder}: is there already; give a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    meta = Meta(iteration=0, consumed_samples=0, updates=0, scaler=None, order=None, model=model.identity())
    try:
        try:
            partial.mkdir(parents=True)
            for part, own in _parts(path, found, model, family):
                safetensors.write(part_file(partial, part), own, of_part(part, meta.iteration))
            meta = replace(meta, parts=written(partial, part_names(model.layers), meta.iteration))
            (partial / META).write_text(meta.as_json(), encoding="utf-8")
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # renamed, or not to be kept
    except OSError as error:
        raise EngineError(f"{folder}: cannot be written: {error}") from error
    return Checkpoint(folder, meta)


def _config(source: Path) -> Dict[str, Any]:
    """config.json of a folder, of a model as the engine has them; empty if there is none."""
    path = source / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise EngineError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def _without_prefix(path: Path, tensors: Dict[str, Tensor]) -> Dict[str, Tensor]:
    found: Dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = name[len(hf_gpt2.PREFIX) :] if name.startswith(hf_gpt2.PREFIX) else name
        if plain in found:
            raise EngineError(
                f"{path}: the tensor {plain} is there twice, with {hf_gpt2.PREFIX!r} before its name and without"
            )
        found[plain] = tensor
    return found


def _parts(
    path: Path, found: Dict[str, Tensor], model: ModelConfig, family: Any
) -> Iterator[Tuple[str, Dict[str, Tensor]]]:
    for part in part_names(model.layers):
        yield (
            part,
            {
                f"{WEIGHTS}/{name}": twin.ours(path, found, checkpoint_parameter(model, part, name))
                for name, twin in family.twins(model, part).items()
            },
        )


def main(argv: List[str]) -> int:
    """The command; exit code 0, 1 with a message on stderr, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.hf",
        description="Checkpoints to and from Hugging Face's layouts of GPT-2, Llama, Mistral, Qwen 2 and Qwen 3.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="weights of a checkpoint to a folder or a .safetensors file")
    out.add_argument("checkpoint", type=Path, help="a run folder, its checkpoints folder, or one of the folders in it")
    out.add_argument("out", type=Path)
    add_weights(out)
    back = commands.add_parser("import", help="weights to a new checkpoint folder, for train.load")
    back.add_argument(
        "source", type=Path, help="a folder with config.json and the weights in one file or in shards, or such a file"
    )
    back.add_argument("checkpoint", type=Path)
    back.add_argument("--heads", type=int, help="attention heads, where no config.json says")
    back.add_argument("--sequence-length", type=int, help="of a Llama's samples; else the longest that it allows")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "export":
            checkpoint = Checkpoint.at(arguments.checkpoint)
            kind = kind_of(checkpoint, arguments.weights)
            export(checkpoint, arguments.out, kind)
            tell_kind(kind, arguments.weights)
            print(arguments.out)
        else:
            made = import_(arguments.source, arguments.checkpoint, arguments.heads, arguments.sequence_length)
            print(f"{made.folder}: " + " ".join(f"model.{key}={value}" for key, value in made.meta.model.items()))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
