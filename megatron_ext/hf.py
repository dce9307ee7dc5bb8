"""Checkpoints to and from the layout of Hugging Face's GPT-2.

    python -m megatron_ext.hf export CHECKPOINT OUT     CHECKPOINT: a run folder, its checkpoints folder or one of these
    python -m megatron_ext.hf import FROM CHECKPOINT    which train.load then takes

OUT and FROM are a folder with config.json and model.safetensors, or a file of that format alone; FROM may also have
its weights in shards, beside model.safetensors.index.json. Only weights cross.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from torch import Tensor

from megatron_ext.checkpoints import hf_files, safetensors
from megatron_ext.checkpoints.meta import Checkpoint, Meta, part_file, part_names
from megatron_ext.checkpoints.tensors import WEIGHTS
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular
from megatron_ext.contract.model import OPTIONS, ModelConfig
from megatron_ext.contract.run_files import META
from megatron_ext.data.indexed_dataset import replacing

PREFIX = "transformer."
"""Of the names in a model with a head; the published GPT-2 files are without it."""
GPT2_END_OF_TEXT = 50256


class Twin(NamedTuple):
    """A parameter's name there and its shape, [outputs] or [inputs, outputs], in hidden sizes (not the embedding's)."""

    name: str
    outputs: int = 1
    inputs: int = 0

    @property
    def transposed(self) -> bool:
        """Whether it lies here as [outputs, inputs]."""
        return self.inputs > 0

    def shape(self, hidden: int) -> List[int]:
        return [factor * hidden for factor in (self.inputs, self.outputs) if factor]


_EMBEDDING = {"word": Twin("wte.weight"), "position": Twin("wpe.weight")}
_HEAD = {"norm.weight": Twin("ln_f.weight"), "norm.bias": Twin("ln_f.bias")}
_LAYER = {
    "attention_norm.weight": Twin("ln_1.weight"),
    "attention_norm.bias": Twin("ln_1.bias"),
    "qkv.weight": Twin("attn.c_attn.weight", outputs=3, inputs=1),
    "qkv.bias": Twin("attn.c_attn.bias", outputs=3),
    "attention_out.weight": Twin("attn.c_proj.weight", outputs=1, inputs=1),
    "attention_out.bias": Twin("attn.c_proj.bias"),
    "mlp_norm.weight": Twin("ln_2.weight"),
    "mlp_norm.bias": Twin("ln_2.bias"),
    "mlp_in.weight": Twin("mlp.c_fc.weight", outputs=4, inputs=1),
    "mlp_in.bias": Twin("mlp.c_fc.bias", outputs=4),
    "mlp_out.weight": Twin("mlp.c_proj.weight", outputs=1, inputs=4),
    "mlp_out.bias": Twin("mlp.c_proj.bias"),
}
_FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
"""Keys of config.json in which every model here is the same; all but the first have these values if absent."""


def twins(part: str) -> Dict[str, Twin]:
    """The parameters of a part of a checkpoint."""
    if part.startswith("layer-"):
        number = int(part[len("layer-") :])
        return {ours: twin._replace(name=f"h.{number}.{twin.name}") for ours, twin in _LAYER.items()}
    return _EMBEDDING if part == "embedding" else _HEAD


def export(checkpoint: Checkpoint, out: Path) -> None:
    """Writes the weights to `out`: a file if its name ends with .safetensors, else a folder with config.json too.

    Raises:
        EngineError: the checkpoint is damaged, or `out` cannot be written.
    """
    tensors: Dict[str, Tensor] = {}
    model = checkpoint.meta.config()
    other = sorted(set(model.identity()) & OPTIONS.keys())
    if other:
        raise EngineError(
            f"{checkpoint.folder}: not a GPT-2: "
            + ", ".join(f"model.{key}={getattr(model, key)}" for key in other)
            + "; only models with GPT-2's options are exported"
        )
    for part in part_names(model.layers):
        content = safetensors.read(checkpoint.part(part))
        for name, twin in twins(part).items():
            tensor = _taken(checkpoint.part(part), content, f"{WEIGHTS}/{name}")
            tensors[PREFIX + twin.name] = tensor.t() if twin.transposed else tensor
    as_file = out.suffix == ".safetensors"
    if not as_file:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"{out}: cannot be written: {error}") from error
    safetensors.write(out if as_file else out / "model.safetensors", tensors, {"format": "pt"})
    if not as_file:
        with replacing(out / "config.json") as file:
            file.write((json.dumps(config_of(model), indent=2) + "\n").encode())


def import_(source: Path, folder: Path, heads: Optional[int]) -> Checkpoint:
    """Makes a checkpoint of iteration 0 in the new `folder`. `heads` is needed for a file without a config.json.

    Raises:
        EngineError: `source` is not a GPT-2 that this engine computes, or `folder` is there or cannot be written.
            Nothing is then left of it.
    """
    config = _config(source.parent if source.name == hf_files.INDEX else source)
    path, tensors = hf_files.read(source)
    found: Dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = name[len(PREFIX) :] if name.startswith(PREFIX) else name
        if plain in found:
            raise EngineError(f"{path}: the tensor {plain} is there twice, with {PREFIX!r} before its name and without")
        found[plain] = tensor
    model = _model(path, found, config, heads)
    if folder.exists():
        raise EngineError(f"{folder}: is there already; give a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    meta = Meta(iteration=0, consumed_samples=0, updates=0, scaler=None, order=None, model={**model})
    try:
        try:
            partial.mkdir(parents=True)
            for part, own in _parts(path, found, model["layers"]):
                safetensors.write(part_file(partial, part), own, {})
            (partial / META).write_text(meta.as_json(), encoding="utf-8")
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # renamed, or not to be kept
    except OSError as error:
        raise EngineError(f"{folder}: cannot be written: {error}") from error
    return Checkpoint(folder, meta)


def _model(path: Path, found: Dict[str, Tensor], config: Dict[str, Any], heads: Optional[int]) -> Dict[str, int]:
    """The sizes of a model, as its tensors and its config.json agree on them."""
    word, position = (_taken(path, found, twin.name) for twin in _EMBEDDING.values())
    numbers = [int(name.split(".")[1]) for name in found if re.match(r"h\.\d+\.", name)]
    sizes = {
        "n_layer": max(numbers, default=-1) + 1,
        "n_embd": word.shape[-1],
        "n_positions": position.shape[0],
        "vocab_size": word.shape[0],
    }
    for key, size in sizes.items():
        if config.get(key, size) != size:
            raise EngineError(f"{path}: its tensors have {key}={size}, but config.json has {key}={config[key]!r}")
    if heads is None:
        heads = config.get("n_head")
    if heads is None:
        raise EngineError(f"{path}: no config.json beside it with n_head: give the number of heads with --heads")
    if not isinstance(heads, int) or heads < 1 or sizes["n_embd"] % heads:
        raise EngineError(f"{path}: {heads!r} attention heads do not divide the hidden size {sizes['n_embd']}")
    if "lm_head.weight" in found and not found["lm_head.weight"].equal(word):
        raise EngineError(f"{path}: its lm_head.weight is not its embedding, but the engine's models tie them")
    return {
        "layers": sizes["n_layer"],
        "hidden": sizes["n_embd"],
        "heads": heads,
        "sequence_length": sizes["n_positions"],
        "vocab_size": sizes["vocab_size"],
    }


def config_of(model: ModelConfig) -> Dict[str, Any]:
    """config.json of a model; no dropout, as it was trained."""
    # GPT-2's end of text is what a reader assumes, but a smaller vocabulary has no such token.
    ends = {} if model.vocab_size > GPT2_END_OF_TEXT else {"bos_token_id": None, "eos_token_id": None}
    return {
        "architectures": ["GPT2LMHeadModel"],
        **_FIXED,
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_positions": model.sequence_length,
        "vocab_size": model.vocab_size,
        **ends,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


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
    inner = config.get("n_inner")
    if inner is not None and inner != 4 * config.get("n_embd", 0):
        raise EngineError(f"{path}: n_inner={inner}, but the engine's models have 4 x n_embd")
    for key, value in _FIXED.items():
        if config.get(key, value) != value or (key == "model_type" and key not in config):
            raise EngineError(f"{path}: expected {key}={value!r}, found {config.get(key)!r}")
    return config


def _parts(path: Path, found: Dict[str, Tensor], layers: int) -> Iterator[Tuple[str, Dict[str, Tensor]]]:
    hidden = found[_EMBEDDING["word"].name].shape[1]
    for part in part_names(layers):
        tensors = {}
        for name, twin in twins(part).items():
            tensor = _taken(path, found, twin.name).float()
            shape = list(tensor.shape) if part == "embedding" else twin.shape(hidden)
            if list(tensor.shape) != shape:
                raise EngineError(f"{path}: expected {twin.name} of shape {shape}, found {list(tensor.shape)}")
            tensors[f"{WEIGHTS}/{name}"] = tensor.t() if twin.transposed else tensor
        yield part, tensors


def _taken(path: Path, tensors: Dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise EngineError(f"{path}: expected a tensor {name}, found {len(tensors)} others")
    return tensors[name]


def main(argv: List[str]) -> int:
    """The command; exit code 0, 1 with a message on stderr, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.hf", description="Checkpoints to and from Hugging Face's GPT-2 layout."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="weights of a checkpoint to a folder or a .safetensors file")
    out.add_argument("checkpoint", type=Path, help="a run folder, its checkpoints folder, or one of the folders in it")
    out.add_argument("out", type=Path)
    back = commands.add_parser("import", help="weights to a new checkpoint folder, for train.load")
    back.add_argument(
        "source", type=Path, help="a folder with config.json and the weights in one file or in shards, or such a file"
    )
    back.add_argument("checkpoint", type=Path)
    back.add_argument("--heads", type=int, help="attention heads, where no config.json tells them")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "export":
            export(Checkpoint.at(arguments.checkpoint), arguments.out)
            print(arguments.out)
        else:
            made = import_(arguments.source, arguments.checkpoint, arguments.heads)
            print(f"{made.folder}: " + " ".join(f"model.{key}={value}" for key, value in made.meta.model.items()))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
