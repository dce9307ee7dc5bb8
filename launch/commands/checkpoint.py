"""`tdpp checkpoint`: gives the weights of a trained run to other programs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from conf.errors import RunFolderError
from conf.reading.parser import Parser
from conf.run_folder.run_folders import run_around
from conf.run_folder.rundir import RunDir
from launch.commands.run_arguments import add_runs_dir
from launch.commands.translate import add_checkpoint, require_torch
from launch.errors import LaunchError, of_engine
from launch.screen import remark
from megatron_ext.checkpoints.kept_weights import kind_of, tell_kind
from megatron_ext.contract.models.model import ModelConfig

READERS = {
    "huggingface": "from_pretrained of transformers",
    "megatron": "Megatron-LM and megatron.core, in any layout",
    "tdpp": "train.load",
}
"""What loads a folder, by the value of --to."""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp checkpoint <argv>`; returns 0 once the folder is there."""
    arguments = parser().parse_args(argv)
    require_torch("tdpp checkpoint")
    from megatron_ext.checkpoints.converting import HUGGINGFACE, MEGATRON, TDPP, convert, publish
    from megatron_ext.checkpoints.foreign.torch_dist import is_torch_dist
    from megatron_ext.contract.rules.engine import LATENT
    from megatron_ext.inference.held_out import checkpoint_of

    if is_torch_dist(Path(arguments.run)) and not _names_run(arguments):
        return _convert_megatrons(arguments, Path(arguments.run), None)
    run = RunDir.find(arguments.runs_dir, arguments.run)
    plan, out, source = run.read_plan(), arguments.folder, None
    traits = plan.model.traits
    layouts = [TDPP, *([HUGGINGFACE] * (traits.published or traits.megatron_lm)), *([MEGATRON] * traits.megatron_lm)]
    if arguments.to not in layouts:
        told = f"model.family={plan.model.family} has the layouts {', '.join(layouts)}"
        raise LaunchError(f"--to {arguments.to}: {told}")
    if arguments.to != TDPP and (plan.engine_options or {}).get(LATENT) is True:
        raise LaunchError(
            f"--to {arguments.to}: run {run.name} has engine.options.{LATENT}=true, of which that layout has no "
            f"weights; use --to {TDPP}"
        )
    if arguments.adapter and not (traits.published and arguments.to == HUGGINGFACE):
        raise LaunchError(f"--adapter: model.family={plan.model.family} has no adapters with --to {arguments.to}")
    if is_torch_dist(run.checkpoints):
        return _convert_megatrons(arguments, run.checkpoints, plan.model)
    with of_engine():
        checkpoint = checkpoint_of(run.path, arguments.checkpoint)
        kind = kind_of(checkpoint, arguments.weights)
        if arguments.to == HUGGINGFACE:
            source = publish(plan, checkpoint, out, kind, arguments.adapter)
        else:
            convert(checkpoint, arguments.to, out, kind, plan)
    if arguments.to != TDPP:  # which has both
        tell_kind(kind, arguments.weights)
    reader = "peft, as an adapter" if arguments.adapter else READERS[arguments.to]
    print(f"written: {out}: {checkpoint.folder.name} of {run.name}, for {reader}")
    if source is not None:
        print(f"with the tokenizer's and generation's files of {source}")
    return 0


def _names_run(arguments: argparse.Namespace) -> bool:
    """Whether a word without a slash is a run's name, which then means the run, not a folder of this name."""
    if os.sep in arguments.run or run_around(Path(arguments.run)) is not None:  # a folder in a run is that folder
        return False
    try:
        RunDir.find(arguments.runs_dir, arguments.run)
    except RunFolderError:
        return False
    return True


def _convert_megatrons(arguments: argparse.Namespace, folder: Path, model: ModelConfig | None) -> int:
    """Converts the newest checkpoint in a folder of Megatron-LM's; without a `model`, the one that it says it is of."""
    from megatron_ext.checkpoints.converting import MEGATRON, TDPP, convert
    from megatron_ext.checkpoints.foreign.megatron_args import model_in
    from megatron_ext.checkpoints.foreign.megatron_names import Weights
    from megatron_ext.checkpoints.foreign.torch_dist import folder_of

    for flag in ("checkpoint", "weights", "adapter"):
        if getattr(arguments, flag):
            raise LaunchError(
                f"--{flag}: {folder} has checkpoints of Megatron-LM, of which the newest one is read; leave it out, or "
                "give the folder of one in place of the run"
            )
    with of_engine():
        source = Weights(folder, model_in(folder) if model is None else model, training=arguments.to == TDPP)
        convert(source, arguments.to, arguments.folder)
    if arguments.to == TDPP and source.reached is None:
        remark("weights alone, with which a run begins at iteration 0: no optimizer's state is there")
    if arguments.to == MEGATRON:
        remark("weights alone: Megatron-LM itself continues from its own checkpoints")
    print(f"written: {arguments.folder}: {folder_of(folder)}, for {READERS[arguments.to]}")
    if model is None:
        print("the model: " + " ".join(f"model.{key}={value}" for key, value in source.model.identity().items()))
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="tdpp checkpoint", description="Give the weights of a trained run to other programs.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    convert = commands.add_parser("convert", help="write a run's weights into a folder that another program loads")
    convert.add_argument(
        "run",
        metavar="RUN",
        help="a run folder, a name, a job id, or 'latest'; or a folder that Megatron-LM saved as torch_dist (./FOLDER "
        "where a run has its name)",
    )
    convert.add_argument("folder", metavar="FOLDER", type=Path, help="the new folder")
    convert.add_argument(
        "--to",
        required=True,
        choices=list(READERS),
        help="the layout: config.json and model.safetensors, for from_pretrained of Hugging Face's transformers; "
        "Megatron-Core's torch_dist; or a checkpoint of tdpp's, for train.load",
    )
    convert.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with train.lora_rank: write the adapter alone, for peft, instead of adding it to the weights",
    )
    add_runs_dir(convert)
    add_checkpoint(convert)
    return made
