"""`tdpp translate`: translates text with a trained run, or exports its model to a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from conf.errors import RunFolderError, reworded
from conf.reading.parser import Parser
from conf.run_folder.rundir import RunDir
from launch.commands.bleu import add_bleu, print_bleu, require_bleu
from launch.commands.run_arguments import add_run, chosen_run
from launch.errors import LaunchError, of_engine
from launch.screen import remark
from megatron_ext.checkpoints.kept_weights import add_weights, kind_of, note
from megatron_ext.contract.files import read_regular_text
from megatron_ext.inference.scoring import add_scoring, scoring_of

if TYPE_CHECKING:
    from megatron_ext.inference.exported import Exported


def main(argv: Sequence[str]) -> int:
    """Reads lines of the source language, and prints a translation of each; or writes the model to a file, or prints
    BLEU."""
    arguments = parser().parse_args(argv)
    run = chosen_run(arguments)
    require_bleu(arguments)
    require_torch("tdpp translate")
    from megatron_ext.inference import exported
    from megatron_ext.inference.lines import translated
    from megatron_ext.inference.text import Counting, tokenizer_of
    from megatron_ext.inference.translator import Translator

    with of_engine():
        if arguments.bleu:
            print_bleu(run, arguments, lambda one: model_of(run, one.folder.name, arguments.weights))
            return 0
        model, message = model_of(run, arguments.checkpoint, arguments.weights)
        if arguments.weights is None and message is not None:
            remark(message)
        if arguments.export is not None:
            exported.write(arguments.export, model)
            print(arguments.export)
            return 0
        translator = Translator(model.model, model.weights, arguments.device)
        tokenizer = Counting(tokenizer_of(model.tokenizer))
        with _reading(arguments.input) as lines, _writing(arguments.output) as output:
            for line in translated(lines, translator, tokenizer, scoring_of(arguments), live=arguments.input is None):
                print(line, file=output, flush=True)
        if (doubt := tokenizer.doubt()) is not None:
            print(f"warning: {doubt}", file=sys.stderr)
    return 0


def model_of(run: RunDir, checkpoint: str | None, weights: str | None) -> tuple[Exported, str | None]:
    """The model of a run's checkpoint, its parts merged by name, with the tokenizer of the run's data; and what is to
    be said of its weights, `trained`, `ema` or those that are there, if somebody did not ask.

    Raises:
        RunFolderError: the run has no usable plan.
        EngineError: no such checkpoint exists, or its model does not translate.
        LaunchError: the tokenizer is not there.
    """
    from megatron_ext.inference.exported import Exported
    from megatron_ext.inference.held_out import checkpoint_of
    from megatron_ext.inference.translator import weights_of

    found = checkpoint_of(run.path, checkpoint)
    kind = kind_of(found, weights)
    tensors = weights_of(found, kind)
    path = Path(f"{run.read_plan().data_prefix}.tokenizer.json")
    with reworded(
        LaunchError,
        f"{path}: cannot be read (",
        "); the tokenizer belongs beside the data that the run was trained on",
        of=(OSError, ValueError),
    ):
        tokenizer = read_regular_text(path)
    return Exported(found.meta.model, tensors, tokenizer), note(kind)


def require_torch(command: str) -> None:
    """Raises LaunchError where torch is not installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise LaunchError(f"{command} needs torch, which is not installed; run pip install -e '.[train]'")


def add_checkpoint(parser: Parser) -> None:
    parser.add_argument("--checkpoint", metavar="NAME", help="a folder in the run's checkpoints/ (default: the newest)")
    add_weights(parser)


def parser() -> Parser:
    made = Parser(
        prog="tdpp translate", description="Translate text with a trained run, measure BLEU, or export the model."
    )
    add_run(made)
    add_checkpoint(made)
    made.add_argument("--input", type=Path, metavar="FILE", help="text, one sentence per line (default: stdin)")
    made.add_argument("--output", type=Path, metavar="FILE", help="default: stdout")
    made.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the model to FILE, for use with python -m megatron_ext.translate",
    )
    add_bleu(made)
    add_scoring(made)
    return made


@contextmanager
def _reading(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        yield sys.stdin
        return
    with reworded(RunFolderError, f"--input {path}: cannot be read (", ")"):
        file = path.open(encoding="utf-8", errors="replace")
    with file:
        yield file


@contextmanager
def _writing(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with reworded(RunFolderError, f"--output {path}: cannot be written (", ")"):
        file = path.open("w", encoding="utf-8")
    with file:
        yield file
