"""The page of a search: the best plan first, then all that were found, and of each where its time and memory go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from conf.schema.values.partition import run_length_text
from conf.visible import plural
from fasop.costs.profiles.doubts import doubts
from fasop.search.findings.idle_gpus import marked
from fasop.search.findings.words import best_layers
from fasop.search.front import COST, Expense
from fasop.search.plan import Plan, Run
from fasop.simulation.predict import Prediction, predict_plan
from fasop.tables.plans import options
from reports.facts.frames import TITLES, Terms, predicted_memory_frame
from reports.figures.chart import Axis, Item, dots, parallel
from reports.figures.embed import TIMELINE, embedded, looks, plotly_script, shared
from reports.figures.pack import pack, predicted_columns
from reports.figures.page import Cell, Row, copy_button, copyable, data, number, page, static, table, table_behind
from reports.readers.events import legend_order
from reports.sections.stages_section import memory_parts

MOST = 20
"""So many plans, the first, are shown in all detail."""
SCRIPTS = ("scheme.js", "theme.js", *TIMELINE, "iteration.js", "search.js", "figures.js")


def render(
    command: str,
    plans: Sequence[Plan],
    run: Run,
    searched: Sequence[str] = (),
    launches: Sequence[str] = (),
    expense: Expense = COST,
) -> str:
    """The page, as HTML.

    Args:
        command: that found the plans.
        plans: at least one; the fastest first, or the one that takes least of the expense.
        run: the whole training that they are for.
        searched: in words, what the search has gone through, what it left out, and what is to be known of single plans.
        launches: of each plan, the command that launches it.
        expense: what the plans take besides time.
    """
    launches = launches or [""] * len(plans)
    length = Length.of(plans, run, expense)
    shown = [predict_plan(plan) for plan in plans[:MOST]]
    names = legend_order({event.kind for one in shown for event in one.events})
    packed = pack(predicted_columns(shown, names))
    facts = {
        "names": names,
        "layout": packed.layout,
        "plans": [_facts(plan, one) for plan, one in zip(plans, shown, strict=False)],
    }
    parts = (_table(plans, length, launches), _charts(plans, length))
    body = [
        '<header><p class="crumbs">tdpp search</p>'
        f"<h1>{plural(len(plans), 'plan')} for {escape(plans[0].training.model.name)}</h1></header><main>",
        _answer(command, plans, run, length, searched),
        *(parts if len(length.ahead()) < len(plans) else reversed(parts)),
        '<section><h2>A plan in detail</h2><p class="note">Choose a plan in the table above.</p>',
        '<div id="legend"></div></section>',
        *(_detail(number, *one) for number, one in enumerate(zip(plans, shown, launches, strict=False))),
        "</main>",
        data("search", facts),
        shared(),
        looks(),
        f'<script type="text/plain" id="columns">{packed.text}</script>',
    ]
    return page("Search – tdpp", "\n".join(body), [plotly_script(), *(static(name) for name in SCRIPTS)])


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a whole training takes with each plan and what it costs in money or energy, or 1000 iterations where
    nobody said how long it is."""

    known: bool
    unit: str
    times: Sequence[float]
    spent: Sequence[float]
    """NaN where a price, or a GPU's power, is not known."""
    expense: Expense

    @classmethod
    def of(cls, plans: Sequence[Plan], run: Run, expense: Expense) -> Length:
        steps = [math.nan if (step := expense.of_step(plan, run)) is None else step for plan in plans]
        if not run.known:
            milliseconds, thousands = [run.seconds(plan) * 1e3 for plan in plans], [step * 1000 for step in steps]
            return cls(known=False, unit="ms", times=milliseconds, spent=thousands, expense=expense)
        days = [run.days(plan) for plan in plans]
        unit, a_day = next((unit, count) for unit, count, least in UNITS if max(days) >= least)
        times = [one * a_day for one in days]
        spent = [step * run.iterations for step in steps]
        return cls(known=True, unit=unit, times=times, spent=spent, expense=expense)

    @property
    def priced(self) -> bool:
        return any(not math.isnan(one) for one in self.spent)

    @property
    def virtue(self) -> str:
        """What the first of the plans is."""
        return "fastest" if self.times[0] == min(self.times) else self.expense.least

    def ahead(self) -> set[int]:
        """Returns the plans that no other one beats in both time and expense; none where that is not known."""
        both = [*zip(self.times, self.spent, strict=True)]
        return {
            number
            for number, (time, cost) in enumerate(both)
            if not math.isnan(cost)
            and not any(t <= time and price <= cost and (t, price) != (time, cost) for t, price in both)
        }

    @property
    def spent_title(self) -> str:
        return self.expense.unit if self.known else f"{self.expense.unit}/1000 steps"


UNITS = (("days", 1.0, 0.1), ("hours", 24.0, 1 / 24), ("minutes", 1440.0, 0.0))
"""Units of a training's length: how many there are in a day, and from how many days on each is used."""


def _answer(command: str, plans: Sequence[Plan], run: Run, length: Length, searched: Sequence[str]) -> str:
    plan, virtue = plans[0], length.virtue
    rate, unit = _rate(plan)
    paid = "" if math.isnan(length.spent[0]) else f" and {length.expense.text(length.spent[0], ',.2f')}"
    whole = f"; {run.iterations:,} iterations take {length.times[0]:,.3g} {length.unit}{paid}" if run.known else ""
    remarks = [*doubts(plan.training, plan.kinds, {one.basis for one in plans}), *searched]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in remarks)
    layers = best_layers(plan.gap)
    known = any(layers in note for note in remarks) or not plan.bound
    proved = "" if known else f" {layers}"
    return (
        f'<section class="verdict good"><h2>{virtue}: {escape(_sizes(plan))}</h2>'
        f'<p class="reason">{plan.total * 1e3:,.1f} ms per iteration, {rate:,.0f} {unit}{whole}.</p>'
        f"<p>{escape(_trained_on(plan, run))}</p>"
        f"<p>{'Blocks' if plan.training.blocks.names else 'Layers'} {escape(folded(plan))} on "
        f"{escape(str(plan.parallel.node_order))}.{escape(proved)}</p>{notes}"
        f"{copyable(command)}</section>"
    )


def _trained_on(plan: Plan, run: Run) -> str:
    """Batch, tokens and precision, for which all plans are."""
    batch, tokens = plan.parallel.global_batch_size, plan.training.model.sequence_length
    message = f"All plans: global batch {batch:,}"
    message += f" samples of {tokens:,} tokens ({batch * tokens:,} tokens an iteration)" if tokens else " samples"
    message += f", {plan.training.precision}"
    if not run.known:
        return f"{message}; the length of the training is not given."
    seen = run.iterations * batch
    unit = "tokens" if tokens else "samples"
    return f"{message}; {run.iterations:,} iterations process {seen * (tokens or 1):,} {unit}."


def _rate(plan: Plan) -> tuple[float, str]:
    """What it trains in a second: tokens, or samples of a model that has none."""
    samples, tokens = plan.parallel.global_batch_size / plan.total, plan.training.model.sequence_length
    return (samples * tokens, "tokens/s") if tokens else (samples, "samples/s")


def _sizes(plan: Plan) -> str:
    one = plan.parallel
    sizes = f"tensor {one.tensor} × data {one.replicas or one.data} × pipeline {one.pipeline}"
    return f"{sizes}, micro-batch {one.micro_batch_size}, {options(one)}"


def _tone(number: int, ahead: set[int]) -> str:
    return "best" if number == 0 else "front" if number in ahead else ""


def _link(number: int) -> str:
    """To a plan's details; none of one that is not shown in detail."""
    return f"#plan-{number + 1}" if number < MOST else ""


def _table(plans: Sequence[Plan], length: Length, launches: Sequence[str]) -> str:
    """What is paid and waited for comes first; what makes a plan fast follows."""
    ahead = length.ahead()
    titles = ["plan", "nodes", length.spent_title, *([length.unit] if length.known else [])]
    titles += ["ms", _rate(plans[0])[1], "tensor × data × pipeline", "micro-batch", "options", "layers by stage"]
    titles += ["idle GPUs", "launch"]
    marks = {"best": "★", "front": "◆", "": ""}
    rows, attributes = list[Row](), []
    for index, (plan, launch) in enumerate(zip(plans, launches, strict=True)):
        one, tone = plan.parallel, _tone(index, ahead)
        name = f'<a href="{_link(index)}">{index + 1}</a>' if index < MOST else str(index + 1)
        attributes.append(f' class="{tone}" data-plan="{index}"')
        rows.append(
            [
                Cell(f'{name} <span class="tag">{marks[tone]}</span>'),
                Cell("+<wbr>".join(map(escape, str(one.node_order).split("+")))),  # where a line may be broken
                _number(number(length.spent[index], ",.2f") if length.priced else ""),
                *([_number(f"{length.times[index]:,.3g}")] if length.known else []),
                _number(f"{plan.total * 1e3:,.1f}"),
                _number(f"{_rate(plan)[0]:,.0f}"),
                f"{one.tensor} × {one.replicas or one.data} × {one.pipeline}",
                str(one.micro_batch_size),
                options(one),
                folded(plan),
                marked(plan),
                Cell(copy_button(launch, "Copy")) if launch else "",
            ]
        )
    note = f"★ {length.virtue}"
    note += f" · ◆ no other plan here takes less of both time and {length.expense.what}" if ahead else ""
    note += " · 4*3: three stages of 4 layers" if any("*" in folded(plan) for plan in plans) else ""
    note += f" · details of the first {MOST} below" if len(plans) > MOST else ""
    drawn = table(titles, rows, kind="runs plans", row_attributes=attributes)
    return f'<section><h2>Plans</h2>{drawn}<p class="note">{note}</p></section>'


def folded(plan: Plan) -> str:
    """Layers by stage, equal ones that follow each other once: `4*3 3*12 1`; by island where each has its own."""
    cuts = [own.partition or () for own in plan.training.parallel.own_plans] or [plan.partition.layers]
    return " / ".join(run_length_text([str(layers) for layers in cut], " ") for cut in cuts)


def _number(text: str) -> Cell:
    return Cell(text and escape(text), ' class="number"') if text else Cell("")


def _charts(plans: Sequence[Plan], length: Length) -> str:
    if len(plans) == 1:
        return ""
    ahead = length.ahead()
    front = len(ahead) == len(plans)
    items = [
        Item(
            name=f"plan {number + 1}",
            link=_link(number),
            tone=_tone(number, ahead),
            label=(f"{number + 1}: {plan.parallel.node_order}" if front else str(number + 1)),
        )
        for number, plan in enumerate(plans)
    ]
    time = Axis(title=length.unit if length.known else "iteration ms", values=length.times)
    what = length.expense.what
    cost = Axis(title="dollars" if length.spent_title == "$" else length.spent_title, values=length.spent)
    keys = {
        "tensor": [str(plan.parallel.tensor) for plan in plans],
        "data": [plan.parallel.replicas or str(plan.parallel.data) for plan in plans],
        "pipeline": [str(plan.parallel.pipeline) for plan in plans],
        "micro-batch": [str(plan.parallel.micro_batch_size) for plan in plans],
        "nodes": [str(plan.parallel.node_order) for plan in plans],
        "options": [options(plan.parallel) for plan in plans],
    }
    axes = [Axis(title=title, values=values) for title, values in keys.items() if len(set(values)) > 1]
    drawn = embedded(dots(items, cost, time), f"Time and {what} of every plan") if length.priced else ""
    if front:  # the next chart would be a knot of lines
        note = '<p class="note">Each point is a plan, with its row and nodes. Click it to open the plan.</p>'
        return f"<section><h2>Time against {what}</h2>{drawn}{note}</section>"
    label = "A line for each plan across its sizes, time and memory"
    crossing = embedded(parallel(items, [*axes, time, *([cost] if length.priced else [])]), label)
    return f'<section><h2>Charts</h2>{drawn}<div class="scroll">{crossing}</div></section>'


def _detail(number: int, plan: Plan, prediction: Prediction, launch: str) -> str:
    terms = [Terms.of_prediction(stage.terms) for stage in prediction.stages]
    shown = [key for key in TITLES if key not in ("tensor", "imbalance", "other")]
    rows = [
        (
            one.name,
            ", ".join(one.gpus),
            one.contents,
            *(f"{getattr(term, key):,.1f}" for key in shown),
            f"{term.bubble_share:.1%}",
        )
        for one, term in zip(prediction.stages, terms, strict=True)
    ]
    hidden = " hidden" if number else ""
    head = ("stage", "GPU", "layers", *(f"{TITLES[key]} ms" for key in shown), "bubble")
    return (
        f'<section class="plan" id="plan-{number + 1}"{hidden}><h2>Plan {number + 1}: {escape(_sizes(plan))}, '
        f'{plan.total * 1e3:,.1f} ms</h2>{copyable(launch) if launch else ""}<div class="iteration"></div>'
        "<h3>Where the time goes</h3>"
        f"{table_behind(head, rows, f'All {len(rows)} stages', kind='numeric')}<h3>Where the memory goes</h3>"
        f"{memory_parts(predicted_memory_frame(prediction))}</section>"
    )


def _facts(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """What the scripts need to know of a plan."""
    ends = [event.end for event in prediction.events]
    return {
        "events": len(prediction.events),
        "stages": len(prediction.stages),
        "labels": [f"stage {one.name} · {', '.join(one.gpus)}" for one in prediction.stages],
        "length_ns": max(ends) * 1e9,
        "micro_batches": plan.parallel.micro_batches,
        "chunks": plan.parallel.chunks,
    }
