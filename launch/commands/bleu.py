"""BLEU of translations, and of all checkpoints of a run: a line each, the best one marked."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import reworded
from conf.reading.parser import option
from conf.reading.values import whole
from conf.run_folder.rundir import RunDir
from conf.visible import plural
from launch.errors import LaunchError
from launch.screen import print_table
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular_text
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import META
from megatron_ext.data.samples import SPLITS
from megatron_ext.inference.scoring import Scoring, scoring_of
from megatron_ext.inference.sentences import Sentences, held_out

if TYPE_CHECKING:
    from megatron_ext.inference.exported import Exported

ALL = "all"
LACKING = "sacrebleu is not installed; run pip install -e '.[translate]'"
TOKENIZERS = ("13a", "intl", "char", "none")
"""Some of sacreBLEU's."""


@dataclass(frozen=True, kw_only=True)
class Bleu:
    """The BLEU of a split's translations."""

    score: float
    signature: str
    """sacreBLEU's, which says what exactly was computed."""
    sentences: int
    scoring: dict[str, float]
    """`megatron_ext.inference.scoring.Scoring`."""


def bleu_of(
    model: Exported, sentences: Sentences, scoring: Scoring, device: str, lowercase: bool = False, words: str = "13a"
) -> Bleu:
    """Returns the BLEU of a model's translations; `words` is the tokenizer of sacreBLEU, which must be there. Raises
    EngineError: the model does not translate."""
    from sacrebleu.metrics.bleu import BLEU

    from megatron_ext.inference.lines import translated
    from megatron_ext.inference.text import tokenizer_of
    from megatron_ext.inference.translator import Translator

    translator = Translator(model.model, model.weights, device)
    found = list(translated(sentences.source, translator, tokenizer_of(model.tokenizer), scoring))
    metric = BLEU(lowercase=lowercase, tokenize=words)
    score = metric.corpus_score(found, [sentences.target]).score
    signature = str(metric.get_signature())
    return Bleu(score=score, signature=signature, sentences=len(found), scoring=scoring._asdict())


def add_bleu(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `print_bleu`."""
    parser.add_argument("--bleu", action="store_true", help="print BLEU instead of translations")
    parser.add_argument(
        "--epochs", choices=(ALL,), help="with --bleu: score every checkpoint of the run, one line each"
    )
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="with --bleu: the reference translations of --input's lines"
    )
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default="test",
        help="with --bleu and without --input: the split (default: %(default)s)",
    )
    parser.add_argument("--samples", type=option(whole), metavar="N", help="with --bleu: only the first N sentences")
    parser.add_argument("--lowercase", action="store_true", help="with --bleu: ignore case (sacreBLEU's -lc)")
    parser.add_argument(
        "--tokenize",
        choices=TOKENIZERS,
        default="13a",
        help="with --bleu: sacreBLEU's tokenizer (default: %(default)s)",
    )


def require_bleu(arguments: argparse.Namespace) -> None:
    """Raises LaunchError for options that do not go together."""
    if not arguments.bleu:
        for name, given in (("--epochs", arguments.epochs), ("--reference", arguments.reference)):
            if given is not None:
                raise LaunchError(f"{name} {given}: this option works only with --bleu; add --bleu, or leave it out")
        return
    for name, given in (("--export", arguments.export), ("--output", arguments.output)):
        if given is not None:
            raise LaunchError(f"{name} {given}: --bleu writes no file; leave one of the two out")
    if (arguments.input is None) != (arguments.reference is None):
        raise LaunchError(
            "--bleu compares translations of --input with --reference; give both, or neither to score the run's own "
            "text (--split)"
        )
    if arguments.epochs is not None and arguments.checkpoint is not None:
        raise LaunchError(f"--epochs {ALL} scores every checkpoint; leave --checkpoint out")
    if find_spec("sacrebleu") is None:
        raise LaunchError(f"--bleu: {LACKING}")


def print_bleu(
    run: RunDir, arguments: argparse.Namespace, model_of: Callable[[Checkpoint], tuple[Exported, str | None]]
) -> None:
    """Prints the BLEU of the run's chosen checkpoint, or of all.

    Raises:
        EngineError: there is none, or no text.
        RunFolderError: the run has no usable plan.
    """
    from megatron_ext.inference.held_out import checkpoint_of
    from megatron_ext.inference.translator import require_translation

    plan = run.read_plan()
    require_translation(plan.model.family)  # before its text is looked for, which only such a model has
    sentences = _sentences(plan, arguments)
    chosen = _all(run) if arguments.epochs else [checkpoint_of(run.path, arguments.checkpoint)]
    found: list[Bleu] = []
    notes: dict[str, None] = {}
    for checkpoint in chosen:
        model, note = model_of(checkpoint)
        if note is not None:
            notes[note] = None
        found.append(
            bleu_of(model, sentences, scoring_of(arguments), arguments.device, arguments.lowercase, arguments.tokenize)
        )
    best = max(range(len(found)), key=lambda number: found[number].score)
    rows = [
        [
            checkpoint.folder.name,
            str(checkpoint.meta.iteration),
            _epoch(plan, checkpoint),
            f"{one.score:.2f}{'  best' if number == best and len(found) > 1 else ''}",
        ]
        for number, (checkpoint, one) in enumerate(zip(chosen, found, strict=True))
    ]
    print_table(["checkpoint", "iteration", "epoch", "BLEU"], rows)
    print(f"{plural(found[0].sentences, 'sentence')}; {found[0].signature}")
    for note in notes:
        print(f"({note})")


def _all(run: RunDir) -> list[Checkpoint]:
    """Complete ones, the oldest first."""
    folders = [file.parent for file in run.checkpoints.glob(f"*/{META}") if not file.parent.is_symlink()]
    if not folders:
        raise EngineError(f"{run.checkpoints}: no checkpoint found")
    return sorted(map(Checkpoint.read, folders), key=lambda one: one.meta.iteration)


def _sentences(plan: Plan, arguments: Any) -> Sentences:
    if arguments.input is None:
        found = held_out(plan.data_prefix, arguments.split)
    else:
        found = Sentences(_lines(arguments.input), _lines(arguments.reference))
        if len(found.source) != len(found.target):
            raise LaunchError(
                f"--input {arguments.input} has {len(found.source)} lines, and --reference {arguments.reference} has "
                f"{len(found.target)}; line k of one must translate line k of the other"
            )
    return Sentences(*(lines[: arguments.samples] for lines in found))


MOST_TEXT = 1 << 30
"""Bytes of a file of sentences."""


def _lines(path: Path) -> list[str]:
    with reworded(LaunchError, f"{path}: cannot be read (", ")", of=(OSError, ValueError)):
        lines = read_regular_text(path, MOST_TEXT).split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    if not lines:
        raise LaunchError(f"{path}: the file is empty")
    return lines


def _epoch(plan: Plan, checkpoint: Checkpoint) -> str:
    """How often the run had seen its samples; a dash where nobody knows how many there are."""
    meta, train = checkpoint.meta, plan.train
    each = train.samples / train.epochs if train.samples and train.epochs else (meta.order or {}).get("pairs")
    return f"{meta.consumed_samples / each:.2f}" if each else "-"
