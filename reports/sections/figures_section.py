"""The few numbers that sum up a run."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from conf.visible import loss_text, span
from reports.facts.statistics import Statistics, time_of
from reports.figures.page import number
from reports.readers.hardware import peak_tflops, price
from reports.readers.record import Record
from reports.sections.stages_section import ideal

Card = tuple[str, str, str]
"""Name, value, note."""


def figures_section(record: Record, figures: Statistics) -> str:
    """Cards, as HTML."""
    plan, reached = record.plan, record.reached
    known = ideal(plan)
    beside = f" · ideal {known.schedule}: {known.fraction:.1%}" if known else ""
    timed = figures.bubble is not None or not record.log
    bubble, exposed = number(figures.bubble, ".1%"), number(figures.communication, ".1%")
    cards: list[Card] = [
        _progress(record),
        *([] if plan.rehearsal else [_loss(record, reached)]),
        *_evaluations(record),
        _time(record),
        *_speed(record),
        *_operations(record),
        *_energy(record),
        *([("Bubble", bubble, f"of passes + bubble, mean over ranks{beside}")] if timed else []),
        *([("Exposed communication", exposed, "of an iteration, mean over ranks")] if timed else []),
        *_cost(record, reached),
    ]
    items = "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="note">{escape(note)}</dd></div>'
        for name, value, note in cards
    )
    return f'<dl class="cards">{items}</dl>'


def _time(record: Record) -> Card:
    """The iteration time; where the batch changes, per sample."""
    time = time_of(record)
    if time is None:
        return "Iteration time", number(None, ""), ""
    spread = "" if math.isnan(time.spread.half) else f"± {time.text(time.spread.half)} · "
    note = f"{spread}{time.basis}{' · emulated' if record.plan.rehearsal else ''}"
    return "Time per sample" if time.per_sample else "Iteration time", f"{time.figure} ms", note


def _progress(record: Record) -> Card:
    """The last iteration of all; where the batch adapts they are a bound, and its samples say how far it is."""
    train, adapt = record.plan.train, record.plan.adapt
    consumed = record.known("consumed_samples")
    if adapt is None or not adapt.measures or train.samples is None or not len(consumed):
        return "Iteration", f"{record.reached} of {train.iterations}", f"last logged{_consumed(record)}"
    note, left = f"iteration {record.reached}, last logged", train.samples - int(consumed.iloc[-1])
    batches, took = record.known("global_batch_size"), record.known("elapsed_ms")
    if left >= adapt.lower and len(batches) and len(took) and took.iloc[-1] > 0:
        rate = batches.iloc[-1] / took.iloc[-1] * 1e3
        note += f" · the rest will take about {span(left / rate, 2)} at {rate:,.1f} samples/s"
    if train.epochs is None:
        return "Samples", f"{int(consumed.iloc[-1]):,} of {train.samples:,}", note
    return "Epoch", f"{consumed.iloc[-1] * train.epochs / train.samples:.2f} of {train.epochs}", note


def _consumed(record: Record) -> str:
    """The samples up to the last line, and where the run's length is in samples or epochs, what part that is."""
    consumed = record.known("consumed_samples")
    if not len(consumed):
        return ""
    count = int(consumed.iloc[-1])
    return f" · {record.plan.train.progress(count) or f'{count:,} samples'}"


def last_loss(record: Record) -> tuple[int, float | None]:
    """The last that is known, and the iteration of its line: one whose iterations were all skipped has none."""
    losses = record.known("loss")
    return (int(losses.index[-1]), float(losses.iloc[-1])) if len(losses) else (0, None)


def _loss(record: Record, reached: int) -> Card:
    at, loss = last_loss(record)
    since = "" if at == reached else ", none since"
    return "Loss", _text_of(loss), f"mean up to iteration {at}{since}" if at else ""


def _text_of(loss: float | None) -> str:
    return "–" if loss is None or not math.isfinite(loss) else loss_text(loss)


def _evaluations(record: Record) -> list[Card]:
    """The last loss on each of the data that are not trained on."""
    last = {one.data: one for one in (record.upstream.evaluations if record.upstream else ())}
    return [
        (f"{data.capitalize()} loss", _text_of(one.loss), f"after iteration {one.iteration}")
        for data, one in last.items()
    ]


def _energy(record: Record) -> list[Card]:
    joules, watts = settled(record, "energy_j_per_rank"), settled(record, "power_w_per_rank")
    if joules is None:
        return []
    return [("Energy per GPU", number(joules, ",.1f", " J"), f"an iteration · {number(watts, ',.1f', ' W')}")]


def counted(record: Record, key: str) -> list[float]:
    """Returns a figure of each log line; the first line, which has the start-up in it, counts only when it is alone."""
    values: list[float] = record.known(key).astype("float64").tolist()
    return values[1:] or values


def settled(record: Record, key: str) -> float | None:
    """The median of these."""
    return float(np.median(values)) if (values := counted(record, key)) else None


def _speed(record: Record) -> list[Card]:
    """Tokens a second; of a model that has no tokens, samples."""
    samples, tokens = settled(record, "samples_per_s"), settled(record, "tokens_per_s")
    if samples is not None and tokens is None:
        return [("Samples per second", number(samples, ",.1f"), "")]
    return [("Tokens per second", number(tokens, ",.0f"), "")] if tokens is not None or not record.log else []


def utilisation(record: Record) -> float | None:
    """Model-FLOP utilisation: operations of the model a second, over what all GPUs reach at their peak."""
    tflops = settled(record, "tflops_per_rank")
    peak = peak_tflops(record.plan, record.experiment) if record.experiment else None
    return tflops * len(record.plan.ranks) / peak if tflops is not None and peak else None


def _operations(record: Record) -> list[Card]:
    tflops = settled(record, "tflops_per_rank")
    if tflops is None:
        return []
    cards = [("Model TFLOP/s per rank", f"{tflops:{',.1f' if tflops >= 1 else '.2g'}}", "")]
    share = utilisation(record)
    if share is not None and record.experiment:
        peak, precision = peak_tflops(record.plan, record.experiment), record.plan.train.precision
        cards.append(("Model-FLOP utilisation", f"{share:.1%}", f"of {peak:,.0f} TFLOP/s {precision} peak"))
    return cards


def _cost(record: Record, reached: int) -> list[Card]:
    time, tokens = time_of(record), settled(record, "tokens_per_s")
    if record.experiment is None or time is None:
        return []
    known = price(record.plan, record.experiment)
    if not known.per_hour:
        return []
    if time.per_sample:
        consumed = record.known("consumed_samples").iloc[-1]
        parts = [f"${known.of_ms(1000 * time.ms):,.4f} per 1,000 samples"]
        parts += [f"${known.of_ms(time.ms * consumed):,.2f} so far"]
    else:
        parts = [f"${known.of_ms(time.ms):,.4f} an iteration", f"${known.of_ms(time.ms * reached):,.2f} so far"]
    parts += [f"${known.per_hour / 3600 / tokens * 1e6:,.2f} per million tokens"] if tokens else []
    parts += [f"without {', '.join(known.unknown)} (price unknown)"] if known.unknown else []
    return [("Cost", f"{'≥ ' if known.unknown else ''}${known.per_hour:,.2f}/h", " · ".join(parts))]
