"""`tdpp evaluate`: the loss and the metrics of a trained run over held-out data, and BLEU where it translates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from conf.reading.parser import Parser, option
from conf.reading.values import whole
from conf.run_folder.rundir import RunDir
from conf.visible import plural
from launch.commands.bleu import LACKING, Bleu, bleu_of
from launch.commands.run_arguments import add_run, chosen_run
from launch.commands.translate import add_checkpoint, model_of, require_torch
from launch.errors import of_engine
from megatron_ext.checkpoints.kept_weights import TRAINED, kind_of
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import EMA
from megatron_ext.data.samples import SPLITS
from megatron_ext.inference.scoring import Scoring, add_scoring, scoring_of
from megatron_ext.inference.sentences import Sentences, read_sentences


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is written into the run's folder."""

    checkpoint: str
    weights: str
    """`ema`, the average that the run kept, or `trained`."""
    iteration: int
    split: str
    samples: int
    loss: float
    metrics: dict[str, float]
    perplexity: float | None
    """The perplexity of a token, where the task predicts tokens one after the other."""
    bleu: Bleu | None


def main(argv: Sequence[str]) -> int:
    """Prints the figures, and writes them into the run's folder."""
    arguments = parser().parse_args(argv)
    run = chosen_run(arguments)
    require_torch("tdpp evaluate")
    from megatron_ext.inference.held_out import checkpoint_of, measure

    plan = run.read_plan()
    with of_engine():
        checkpoint = checkpoint_of(run.path, arguments.checkpoint)
        kind = kind_of(checkpoint, arguments.weights)
        measured = measure(plan, checkpoint, arguments.split, arguments.samples, arguments.device, kind)
        bleu, why_not = _bleu(run, plan, arguments.checkpoint, arguments, scoring_of(arguments))
    perplexity = measured.metrics.pop("perplexity", None)
    found = Evaluation(
        checkpoint=checkpoint.folder.name,
        weights=kind if kind == EMA else TRAINED,
        iteration=checkpoint.meta.iteration,
        split=arguments.split,
        samples=measured.samples,
        loss=measured.loss,
        metrics=measured.metrics,
        perplexity=perplexity,
        bleu=bleu,
    )
    path = run.evaluation(arguments.split)
    run.write_json(path, asdict(found))
    print(json.dumps(asdict(found)) if arguments.json else text_of(run, found, why_not))
    return 0


def text_of(run: RunDir, found: Evaluation, why_not: str | None) -> str:
    """A figure a line."""
    rows = [("loss", f"{found.loss:.4f}")]
    if found.perplexity is not None:
        rows.append(("perplexity", f"{found.perplexity:.2f}"))
    rows += [(name, f"{value:.4f}") for name, value in found.metrics.items()]
    if found.bleu is not None:
        rows.append(
            ("BLEU", f"{found.bleu.score:.2f} ({plural(found.bleu.sentences, 'sentence')}; {found.bleu.signature})")
        )
    if why_not is not None:
        rows.append(("BLEU", why_not))
    width = max(len(name) for name, _ in rows)
    average = " (average of its weights)" if found.weights == EMA else ""
    head = f"{run.name}: {found.checkpoint}{average}, {plural(found.samples, 'sample')} of {found.split}"
    return "\n".join(
        [head, *(f"  {name:{width}}  {value}" for name, value in rows), f"  {run.evaluation(found.split)}"]
    )


def _bleu(
    run: RunDir, plan: Plan, checkpoint: str | None, arguments: Any, scoring: Scoring
) -> tuple[Bleu | None, str | None]:
    """Returns the BLEU of a model that translates; else, or where there is no such text, the reason, if any."""
    if not plan.model.traits.translates:
        return None, None
    if find_spec("sacrebleu") is None:
        return None, f"not computed: {LACKING}"
    try:
        source, target = (lines[: arguments.samples] for lines in read_sentences(plan.data_prefix, arguments.split))
    except (OSError, ValueError) as error:
        path = getattr(error, "filename", None) or f"{plan.data_prefix}-{arguments.split}.*.txt"
        return None, f"not computed: cannot read {path} ({getattr(error, 'strerror', None) or error})"
    if not source:
        return None, f"not computed: {plan.data_prefix}-{arguments.split}.source.txt has no sentence"
    model, _ = model_of(run, checkpoint, arguments.weights)
    return bleu_of(model, Sentences(source, target), scoring, arguments.device), None


def parser() -> Parser:
    made = Parser(prog="tdpp evaluate", description="Measure a trained run's loss, metrics and BLEU on held-out data.")
    add_run(made)
    add_checkpoint(made)
    made.add_argument("--split", choices=SPLITS, default="test", help="default: %(default)s")
    made.add_argument(
        "--samples",
        type=option(whole),
        metavar="N",
        help="use only the first N samples (default: the whole split once)",
    )
    made.add_argument("--json", action="store_true", help="print the JSON that is also written into the run's folder")
    add_scoring(made)
    return made
