"""What other trainers take of a plan: the formats of `tdpp search export=`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conf.schema.experiment import Precision
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.search.arguments import ExportFormat
from fasop.search.inputs import Inputs
from fasop.search.plan import Plan
from launch.control.exports import flagscale, megatron, nemo, torchtitan
from megatron_ext.contract.rules.engine import only_own_layers


@dataclass(frozen=True, kw_only=True)
class Format:
    """A trainer's own words for a plan."""

    trainer: str
    text: Callable[[Plan], str]
    """What its users paste."""
    only: Mapping[str, str] = field(default_factory=dict)
    """The one value of a key of `parallel` that it has; a search then tries no other."""
    sizes: Callable[[Training], Mapping[str, Any]] = lambda training: {}
    """The sizes that a search tries for it, where the command line gives none."""
    precisions: Sequence[Precision] = tuple(Precision)
    model_faults: Callable[[Training], Iterator[str]] = lambda training: iter(())
    """What it cannot say of a model, in words."""
    faults: Callable[[Plan], Iterator[str]] = lambda plan: iter(())
    """What it cannot say of a plan, in words."""


FORMATS: Mapping[ExportFormat, Format] = {
    ExportFormat.torchtitan: Format(
        trainer="torchtitan",
        text=torchtitan.text,
        only=torchtitan.ONLY,
        sizes=torchtitan.sizes,
        precisions=(Precision.fp32, Precision.bf16),
        model_faults=torchtitan.model_faults,
        faults=torchtitan.faults,
    ),
    ExportFormat.megatron: Format(trainer="Megatron-LM", text=megatron.text),
    ExportFormat.flagscale: Format(
        trainer="FlagScale",
        text=flagscale.text,
        only=flagscale.ONLY,
        model_faults=flagscale.model_faults,
        faults=flagscale.faults,
    ),
    ExportFormat.nemo: Format(trainer="NeMo", text=nemo.text, faults=nemo.faults),
}
ENGINE = "engine=megatron_core"
"""What the search plans for: stages alike, schedules that all formats have, and sends that wait."""


def with_limits(name: ExportFormat, overrides: Sequence[str]) -> list[str]:
    """Returns the words of a command line with those that keep its search to what a format can say. Raises SearchError:
    a word asks for something else."""
    words = [*overrides]
    for key, value in (("engine", ENGINE.partition("=")[2]), *FORMATS[name].only.items()):
        given = [word for word in overrides if word.lstrip("+").partition("=")[0] in (key, f"{key}.kind")]
        for word in given:
            if word.partition("=")[2] != value:
                raise SearchError(f"{word}: export={name} writes plans with {key}={value} only; leave {key} out")
        words += [] if given else [f"{key}={value}"]
    return words


def limited(name: ExportFormat, inputs: Inputs) -> Inputs:
    """Returns what is searched, without the sizes that a format cannot say for this model. Raises SearchError: it
    cannot say the model or its precision at all."""
    one, training, model = FORMATS[name], inputs.training, inputs.training.model
    others = ", ".join(other for other in FORMATS if other != name)
    if not model.traits.megatron_lm:
        raise SearchError(f"model.family={model.family}: export={name} writes GPTs; leave export={name} out")
    for key, value, _ in only_own_layers(lambda key, without: getattr(model, key, without)):
        raise SearchError(f"model.{key}={value}: export={name} does not write it; leave export={name} out")
    for key in training.engine.options:
        raise SearchError(f"engine.options.{key}: export={name} does not write it; leave export={name} out")
    if training.precision not in one.precisions:
        known = " or ".join(map(str, one.precisions))
        raise SearchError(f"train.precision={training.precision}: {one.trainer} has {known}; use one of them")
    for fault in one.model_faults(training):
        raise SearchError(f"{fault}; use export= with one of {others}, or another model")
    sizes = {key: values for key, values in one.sizes(training).items() if key not in inputs.choices.sizes}
    choices = replace(inputs.choices, **sizes)
    return replace(inputs, choices=choices, fault=lambda plan: next(one.faults(plan), None))


def exported(name: ExportFormat, plan: Plan, command: str) -> str:
    """Returns a plan as the trainer's users paste it."""
    return "\n".join([*_head(plan, command), FORMATS[name].text(plan)])


def _head(plan: Plan, command: str) -> Iterator[str]:
    """Comments, in any of the formats: where a plan comes from, and where its ranks lie."""
    yield "# Found by: " + command.replace("\n", "\n# ")
    yield f"# Predicted: {plan.total * 1e3:.1f} ms per iteration; times {plan.basis}."
    yield f"# Ranks are counted through the nodes in this order: {plan.parallel.node_order}."
