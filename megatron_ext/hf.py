"""Checkpoints to and from the layouts of Hugging Face's GPT-2, Llama, Mistral, Mixtral, Qwen 2 and 3, and StableLM.

    python -m megatron_ext.hf export CHECKPOINT OUT     CHECKPOINT: a run folder, its checkpoints folder or one of these
    python -m megatron_ext.hf import FROM CHECKPOINT    which train.load then takes

OUT and FROM are a folder with config.json and model.safetensors, or a file of that format alone; FROM may also have
its weights in shards, beside model.safetensors.index.json. Only weights cross.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List, Optional

from megatron_ext.checkpoints.converting import new_checkpoint, weights_of
from megatron_ext.checkpoints.foreign import hf_weights
from megatron_ext.checkpoints.kept_weights import add_weights, kind_of, tell_kind
from megatron_ext.checkpoints.meta import Checkpoint, Meta
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.run_files import WEIGHTS


def export(checkpoint: Checkpoint, out: Path, kind: str = WEIGHTS) -> None:
    """Writes the weights of this kind to `out`: a file if its name ends with .safetensors, else a folder with
    config.json too. Raises EngineError: the checkpoint is damaged, or `out` cannot be written."""
    hf_weights.save(out, checkpoint.meta.config(), lambda part: weights_of(checkpoint, part, kind))


def import_(
    source: Path, folder: Path, heads: Optional[int] = None, sequence_length: Optional[int] = None
) -> Checkpoint:
    """Makes a checkpoint of iteration 0 in the new `folder`.

    `heads` is needed for GPT-2's file without a config.json; `sequence_length` is a Llama's, if not the longest.

    Raises:
        EngineError: `source` is not a model that this engine computes, or `folder` is there or cannot be written.
            Nothing is then left of it.
    """
    weights = hf_weights.Weights(source, heads, sequence_length)
    weights.check_sums()
    return new_checkpoint(
        folder,
        Meta.beginning(weights.model.identity()),
        lambda part: {f"{WEIGHTS}/{name}": tensor for name, tensor in weights.part(part).items()},
    )


def main(argv: List[str]) -> int:
    """The command; exit code 0, 1 with a message on stderr, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.hf",
        description="Checkpoints to and from Hugging Face's layouts of GPT-2, Llama, Mistral, Mixtral, Qwen 2 and 3, "
        "and StableLM.",
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
