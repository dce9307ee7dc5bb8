"""The page of a search: the best plan first, then all that were found, and of each where its time and memory go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from conf.visible import plural
from fasop.costs.profiles.doubts import doubts
from fasop.search.findings.idle_gpus import marked
from fasop.search.findings.words import best_layers
from fasop.search.plan import Plan, Run, cost_of_step, price_per_hour
from fasop.simulation.predict import Prediction, predict_plan
from fasop.tables.plans import options
from reports.facts.frames import predicted_memory_frame
from reports.facts.terms import TITLES, Terms
from reports.figures.chart import Axis, Item, dots, parallel
from reports.figures.embed import TIMELINE, embedded, looks, plotly_script, shared
from reports.figures.pack import pack, predicted_columns
from reports.figures.page import Cell, Row, copyable, data, number, page, static, table, table_behind
from reports.readers.events import legend_order
from reports.sections.memory_section import memory_parts

MOST = 20
"""So many plans, the first, are shown in all detail."""
SCRIPTS = ("scheme.js", "theme.js", *TIMELINE, "iteration.js", "search.js", "figures.js")


def render(command: str, plans: Sequence[Plan], run: Run, searched: Sequence[str] = ()) -> str:
    """The page, as HTML.

    Args:
        command: that found the plans.
        plans: at least one; the fastest or the cheapest first.
        run: the whole training that they are for.
        searched: in words, what the search has gone through, what it left out, and what is to be known of single plans.
    """
    shown = [predict_plan(plan) for plan in plans[:MOST]]
    names = legend_order({event.kind for one in shown for event in one.events})
    packed = pack(predicted_columns(shown, names))
    facts = {
        "names": names,
        "layout": packed.layout,
        "plans": [_facts(plan, one) for plan, one in zip(plans, shown, strict=False)],
    }
    parts = (_table(plans, run), _charts(plans))
    body = [
        '<header><p class="crumbs">tdpp search</p>'
        f"<h1>{plural(len(plans), 'plan')} for {escape(plans[0].training.model.name)}</h1></header><main>",
        _answer(command, plans, run, searched),
        *(parts if len(_ahead(plans)) < len(plans) else reversed(parts)),
        '<section><h2>A plan in detail</h2><p class="note">Choose a plan in the table above.</p>',
        '<div id="legend"></div></section>',
        *(_detail(number, plan, one) for number, (plan, one) in enumerate(zip(plans, shown, strict=False))),
        "</main>",
        data("search", facts),
        shared(),
        looks(),
        f'<script type="text/plain" id="columns">{packed.text}</script>',
    ]
    return page("Search – tdpp", "\n".join(body), [plotly_script(), *(static(name) for name in SCRIPTS)])


def _virtue(plans: Sequence[Plan]) -> str:
    """What the first of the plans is."""
    return "fastest" if plans[0].total == min(plan.total for plan in plans) else "cheapest"


def _answer(command: str, plans: Sequence[Plan], run: Run, searched: Sequence[str]) -> str:
    plan, virtue = plans[0], _virtue(plans)
    parallel = plan.parallel
    rate, unit = _rate(plan)
    cost = run.cost(plan)
    paid = "" if cost is None else f" and ${cost:,.2f}"
    whole = f"; {run.iterations:,} iterations take {_span(run.days(plan))}{paid}" if run.known else ""
    remarks = [*doubts(plan.training, plan.kinds, {plan.basis}), *searched]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in remarks)
    layers = best_layers(plan.gap)
    proved = "" if any(layers in note for note in remarks) else f" {layers}"
    return (
        f'<section class="verdict good"><h2>{virtue}: {escape(_sizes(plan))}</h2>'
        f'<p class="reason">{plan.total * 1e3:,.1f} ms per iteration, {rate:,.0f} {unit}{whole}.</p>'
        f"<p>{'Blocks' if plan.training.blocks.names else 'Layers'} {escape(str(parallel.partition))} on "
        f"{escape(str(parallel.node_order))}.{escape(proved)}</p>{notes}"
        f"{copyable(command)}</section>"
    )


def _rate(plan: Plan) -> tuple[float, str]:
    """What it trains in a second: tokens, or samples of a model that has none."""
    samples, tokens = plan.parallel.global_batch_size / plan.total, plan.training.model.sequence_length
    return (samples * tokens, "tokens/s") if tokens else (samples, "samples/s")


def _sizes(plan: Plan) -> str:
    one = plan.parallel
    sizes = f"tensor {one.tensor} × data {one.replicas or one.data} × pipeline {one.pipeline}"
    return f"{sizes}, micro-batch {one.micro_batch_size}, {options(one)}"


def _cost(plan: Plan) -> float:
    """US dollars of 1000 iterations; NaN where a price is not known."""
    step = cost_of_step(plan)
    return math.nan if step is None else step * 1000


def _ahead(plans: Sequence[Plan]) -> set[int]:
    """Of these plans those that no other one beats in both time and cost; none where prices are not known."""
    costs = [_cost(plan) for plan in plans]
    return {
        number
        for number, (plan, cost) in enumerate(zip(plans, costs, strict=True))
        if not math.isnan(cost)
        and not any(
            other.total <= plan.total and price <= cost and (other.total, price) != (plan.total, cost)
            for other, price in zip(plans, costs, strict=True)
        )
    }


def _tone(number: int, ahead: set[int]) -> str:
    return "best" if number == 0 else "front" if number in ahead else ""


def _link(number: int) -> str:
    """To a plan's details; none of one that is not shown in detail."""
    return f"#plan-{number + 1}" if number < MOST else ""


def _table(plans: Sequence[Plan], run: Run) -> str:
    ahead = _ahead(plans)
    priced = any(price_per_hour(plan.nodes) is not None for plan in plans)
    titles = [
        "plan",
        "tensor",
        "data",
        "pipeline",
        "micro",
        "layers by stage",
        "nodes",
        "options",
        "ms",
        _rate(plans[0])[1],
    ]
    idle = any(map(marked, plans))
    titles += ["idle GPUs"] * idle
    titles += ["$/1000 steps"] * priced + ["$"] * (priced and run.known) + ["all takes"] * run.known
    marks = {"best": "★", "front": "◆", "": ""}
    rows, attributes = list[Row](), []
    for index, plan in enumerate(plans):
        one, tone = plan.parallel, _tone(index, ahead)
        name = f'<a href="{_link(index)}">{index + 1}</a>' if index < MOST else str(index + 1)
        attributes.append(f' class="{tone}" data-plan="{index}"')
        rows.append(
            [
                Cell(f'{name} <span class="tag">{marks[tone]}</span>'),
                *map(
                    str,
                    (
                        one.tensor,
                        one.replicas or one.data,
                        one.pipeline,
                        one.micro_batch_size,
                        one.partition,
                        one.node_order,
                    ),
                ),
                options(one),
                f"{plan.total * 1e3:,.1f}",
                f"{_rate(plan)[0]:,.0f}",
                *([marked(plan)] if idle else []),
                *([number(_cost(plan), ",.2f")] if priced else []),
                *([number(run.cost(plan), ",.2f")] if priced and run.known else []),
                *([_span(run.days(plan))] if run.known else []),
            ]
        )
    note = f"★ {_virtue(plans)}" + (" · ◆ no other plan here is both faster and cheaper" if ahead else "")
    note += f" · details of the first {MOST} below" if len(plans) > MOST else ""
    drawn = table(titles, rows, kind="runs", row_attributes=attributes)
    return f'<section><h2>Plans</h2>{drawn}<p class="note">{note}</p></section>'


def _span(days: float) -> str:
    if days >= 2:
        return f"{days:,.1f} days"
    return f"{days * 24:.1f} h" if days * 24 >= 1 else f"{days * 1440:.1f} min"


def _charts(plans: Sequence[Plan]) -> str:
    if len(plans) == 1:
        return ""
    ahead = _ahead(plans)
    front = len(ahead) == len(plans)
    items = [
        Item(
            name=f"plan {number + 1}", link=_link(number), tone=_tone(number, ahead), label=_label(number, plan, front)
        )
        for number, plan in enumerate(plans)
    ]
    time = Axis(title="iteration ms", values=[plan.total * 1e3 for plan in plans])
    cost = Axis(title="$ per 1000 steps", values=[_cost(plan) for plan in plans])
    priced = any(not math.isnan(_cost(plan)) for plan in plans)
    keys = {
        "tensor": [str(plan.parallel.tensor) for plan in plans],
        "data": [plan.parallel.replicas or str(plan.parallel.data) for plan in plans],
        "pipeline": [str(plan.parallel.pipeline) for plan in plans],
        "micro-batch": [str(plan.parallel.micro_batch_size) for plan in plans],
        "nodes": [str(plan.parallel.node_order) for plan in plans],
        "options": [options(plan.parallel) for plan in plans],
    }
    axes = [Axis(title=title, values=values) for title, values in keys.items() if len(set(values)) > 1]
    drawn = embedded(dots(items, cost, time), "Time and cost of every plan") if priced else ""
    if front:  # the next chart would be a knot of lines
        note = '<p class="note">Each point is a plan, with its row and nodes. Click it to open the plan.</p>'
        return f"<section><h2>Time against cost</h2>{drawn}{note}</section>"
    label = "A line for each plan across its sizes, time and memory"
    crossing = embedded(parallel(items, [*axes, time, *([cost] if priced else [])]), label)
    return f'<section><h2>Charts</h2>{drawn}<div class="scroll">{crossing}</div></section>'


def _label(number: int, plan: Plan, front: bool) -> str:
    """Beside a plan's dot."""
    return f"{number + 1}: {plan.parallel.node_order}" if front else str(number + 1)


def _detail(number: int, plan: Plan, prediction: Prediction) -> str:
    terms = [Terms.of_prediction(stage.terms) for stage in prediction.stages]
    shown = [key for key in TITLES if key not in ("tensor", "imbalance", "other")]
    rows = [
        (
            str(stage),
            ", ".join(one.gpus),
            one.contents,
            *(f"{getattr(term, key):,.1f}" for key in shown),
            f"{term.bubble_share:.1%}",
        )
        for stage, (one, term) in enumerate(zip(prediction.stages, terms, strict=True))
    ]
    hidden = " hidden" if number else ""
    head = ("stage", "GPU", "layers", *(f"{TITLES[key]} ms" for key in shown), "bubble")
    return (
        f'<section class="plan" id="plan-{number + 1}"{hidden}><h2>Plan {number + 1}: {escape(_sizes(plan))}, '
        f'{plan.total * 1e3:,.1f} ms</h2><div class="iteration"></div><h3>Where the time goes</h3>'
        f"{table_behind(head, rows, f'All {len(rows)} stages', kind='numeric')}<h3>Where the memory goes</h3>"
        f"{memory_parts(predicted_memory_frame(prediction))}</section>"
    )


def _facts(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """What the scripts need to know of a plan."""
    ends = [event.end for event in prediction.events]
    return {
        "events": len(prediction.events),
        "stages": len(prediction.stages),
        "labels": [f"stage {number} · {', '.join(one.gpus)}" for number, one in enumerate(prediction.stages)],
        "length_ns": max(ends) * 1e9,
        "micro_batches": plan.parallel.micro_batches,
        "chunks": plan.parallel.chunks,
    }
