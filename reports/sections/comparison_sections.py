"""Quality against epochs and against time, a line for each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd

from conf.visible import span
from megatron_ext.contract.events import TRAFFIC
from reports.facts.learning import DOLLARS, EPOCHS, HOURS, SAMPLES, Reached, time_to_quality
from reports.facts.side_by_side import Compared, Facts, Sent, speed_up
from reports.figures.chart import lines
from reports.figures.embed import embedded
from reports.figures.page import Cell, Row, number, table, table_behind


def curves_section(runs: Sequence[Compared]) -> str:
    """Draws every metric that any run was evaluated by, over epochs where all have them, else over samples."""
    evaluated = [run for run in runs if not run.facts.learned.evaluations.empty]
    metrics = dict.fromkeys(name for run in evaluated for name in run.facts.learned.metrics)
    charts = []
    for metric in metrics:
        having = [run for run in evaluated if metric in run.facts.learned.evaluations]
        in_epochs = all(EPOCHS in run.facts.learned.evaluations for run in having)
        for axis in (EPOCHS if in_epochs else SAMPLES, HOURS, DOLLARS):
            if all(axis in run.facts.learned.evaluations for run in having):
                title = f"{metric} over {axis}"
                drawn = lines([_curve(run, metric, axis) for run in having], x_title=axis, title=title)
                charts.append(embedded(drawn, title))
    if not charts:
        return ""
    note = '<p class="note">The axes of metrics do not begin at 0.</p>'
    return f'<section><h2>Quality</h2><div class="charts">{"".join(charts)}</div>{note}</section>'


def _curve(run: Compared, metric: str, axis: str) -> pd.Series:
    evaluations = run.facts.learned.evaluations
    return pd.Series(evaluations[metric].to_numpy(), evaluations[axis].to_numpy(), name=run.name).dropna()


_FORMS = {"iteration": ",.0f", SAMPLES: ",.0f", EPOCHS: ",.2f", HOURS: "", DOLLARS: ",.4g"}
_QUALITY_NOTE = (
    "The first evaluation that reached a quality. Qualities are the best value of the worst run, the best value of "
    "the best run, and the goal of train.until; time counts iterations and evaluations."
)


def quality_section(runs: Sequence[Compared]) -> str:
    """Draws what qualities cost; empty where no run has evaluations of a metric whose direction is known."""
    rows = time_to_quality([run.facts.learned for run in runs])
    if not rows:
        return ""
    shown = [name for name in _FORMS if any(row.at is not None and name in row.at for row in rows)]
    cells: list[Row] = []
    for row in rows:
        quality = f"{row.metric} {'≥' if row.larger else '≤'} {row.quality:.6g}"
        cells.append((quality, Cell(runs[row.run].link), *_spent(row, shown)))
    heads = ("time" if name == HOURS else name for name in shown)
    drawn = table(("quality", "run", *heads), cells, kind="quality")
    return f'<section><h2>Time to quality</h2>{drawn}<p class="note">{escape(_QUALITY_NOTE)}</p></section>'


def _spent(row: Reached, shown: Sequence[str]) -> list[str | Cell]:
    if row.at is None:
        return [Cell("not reached", f' class="number" colspan="{len(shown)}"')]
    return [Cell(_text(name, row.at.get(name)), ' class="number"') for name in shown]


def _text(name: str, spent: float | None) -> str:
    if name == HOURS and spent is not None:
        return span(3600 * spent, 3)
    return number(spent, _FORMS[name])


_THROUGHPUT_NOTE = (
    "An epoch counts its iterations, without evaluations. Data parallelism: the fastest of these runs that has the "
    "whole model on each of the same number of workers. Busy: the fraction of an iteration in which ranks on these "
    "GPUs compute. Ratios are of medians: what differs by no more than both ± of the samples/s may differ by chance."
)


def samples_per_s(one: Facts) -> str:
    """With ± and the number of log lines; of a batch that adapts the mean over the whole run."""
    doubt = "" if one.speed is None else f" {one.speed.doubt(lambda half: f'{half:,.1f}')}"
    return f"{number(one.samples_per_s, ',.1f')}{doubt}"


def throughput_section(runs: Sequence[Compared]) -> str:
    """Tabulates throughput; empty where nothing but the samples a second is known."""
    runs = [run for run in runs if run.facts.samples_per_s > 0]
    every = [run.facts for run in runs]
    rows = {
        "epoch s": [number(one.epoch_s, ",.1f") for one in every],
        "samples/s": [samples_per_s(one) for one in every],
        "predicted samples/s": [number(one.predicted_samples_per_s, ",.1f") for one in every],
        "measured / predicted": [number(one.samples_per_s / one.predicted_samples_per_s, ".2f") for one in every],
        "times data parallelism": [number(speed_up(one, every), ".2f") for one in every],
    }
    types = [*dict.fromkeys(gpu for one in every for gpu in one.busy)]
    rows |= {f"{gpu} busy": [number(one.busy.get(gpu, math.nan), ".0%") for one in every] for gpu in types}
    others = [value for one in every for value in (one.epoch_s, one.predicted_samples_per_s)]
    if not types and all(math.isnan(value) for value in others):
        return ""
    known = {title: cells for title, cells in rows.items() if set(cells) != {"–"}}
    cells: list[Row] = [(Cell(run.link), *(values[at] for values in known.values())) for at, run in enumerate(runs)]
    drawn = table(("run", *known), cells, kind="numeric throughput")
    return f'<section><h2>Throughput</h2>{drawn}<p class="note">{escape(_THROUGHPUT_NOTE)}</p></section>'


def depth_section(runs: Sequence[Compared]) -> str:
    """Compares depths; empty where no two runs of the same stages have unlike depths."""
    alike: dict[tuple[object, ...], list[Compared]] = {}
    for run in runs:
        if run.facts.depth:
            stages = tuple(stage.holds for stage in run.facts.stages)
            alike.setdefault((run.facts.model, tuple(run.facts.replicas), stages), []).append(run)
    several = [group for group in alike.values() if len({run.facts.depth for run in group}) > 1]
    return f"<section><h2>Depth</h2>{''.join(map(_group, several))}</section>" if several else ""


def _group(runs: Sequence[Compared]) -> str:
    """Compares runs with the same stages, the shallowest first."""
    ordered = sorted(runs, key=lambda run: run.facts.depth)
    rows: list[Row] = []
    for run in ordered:
        stages = run.facts.stages
        best = ", ".join(f"{name} {run.facts.learned.best(name):.4g}" for name in run.facts.learned.larger)
        rows.append(
            (
                Cell(run.link),
                "-".join(map(str, run.facts.depth)),
                "-".join(str(stage.versions) for stage in stages),
                samples_per_s(run.facts),
                number(run.facts.predicted_samples_per_s, ",.1f"),
                number(stages[0].predicted_gib, ",.3f"),
                number(stages[0].measured_gib, ",.3f"),
                best or "–",
            )
        )
    head = ("run", "depth", "versions", "samples/s", "predicted samples/s", *_GIB, "best quality")
    title = "Samples per second over forward passes ahead on the first stage"
    places = [run.facts.depth[0] for run in ordered]
    measured = pd.Series([run.facts.samples_per_s for run in ordered], places, name="measured")
    predicted = pd.Series([run.facts.predicted_samples_per_s for run in ordered], places, name="predicted").dropna()
    known = [one for one in (measured, predicted) if len(one)]
    drawn = lines(known, x_title="forward passes ahead on stage 0", title="samples/s", from_zero=True)
    return f'{table(head, rows, kind="depth")}<div class="charts">{embedded(drawn, title)}</div>'


_GIB = ("stage 0 predicted GiB", "stage 0 measured GiB")


_TRAFFIC_NOTE = (
    "Counted at the sender. Activations go to the next stage, and their gradients back. All-reduce: weight gradients; "
    "each rank sends as much as in a ring. Most of a rank: the rank that sends the most."
)


def traffic_section(runs: Sequence[Compared]) -> str:
    """Tabulates bytes sent per sample; empty where no run counted them."""
    counted = [(run.link, run.facts.sent) for run in runs if run.facts.sent is not None]
    if not counted:
        return ""
    kinds = [kind for kind in TRAFFIC if any(kind in sent.by_kind for _, sent in counted)]
    largest = max(sent.total for _, sent in counted)
    rows: list[Row] = [
        (Cell(link), *(size(sent.by_kind.get(kind, 0.0)) for kind in kinds), _bar(sent, largest), size(sent.most))
        for link, sent in counted
    ]
    head = ("run", *(kind.replace("_", "-") for kind in kinds), "all", "most of a rank")
    drawn = table(head, rows, kind="numeric traffic")
    return f'<section><h2>Bytes sent per sample</h2>{drawn}<p class="note">{escape(_TRAFFIC_NOTE)}</p></section>'


def size(sent: float) -> str:
    """Bytes in the unit that fits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if sent >= scale:
            return f"{sent / scale:,.2f} {unit}"
    return f"{sent:,.0f} B"


def _bar(sent: Sent, largest: float) -> Cell:
    share = sent.total / largest * 100 if largest else 0
    return Cell(size(sent.total), f' class="number bar" style="--share: {share:.1f}%"')


_STAGES_NOTE = (
    "Versions: the most versions of the stage's weights that are alive at once, known before a run starts. Ahead: "
    "forward passes before the first backward pass. Measured: the peak over the stage's ranks; on CPUs, of the whole "
    "process."
)


def stages_section(runs: Sequence[Compared]) -> str:
    """Tabulates memory and versions by stage; empty where no run says what its stages are."""
    rows: list[Row] = [
        (
            Cell(run.link) if stage == 0 else "",
            str(stage),
            one.holds,
            str(one.replicas),
            "–" if one.ahead is None else str(one.ahead),
            str(one.versions),
            number(one.predicted_gib, ",.2f"),
            number(one.measured_gib, ",.2f"),
        )
        for run in runs
        for stage, one in enumerate(run.facts.stages)
    ]
    if not rows:
        return ""
    head = ("run", "stage", "holds", "replicas", "ahead", "versions", "predicted GiB", "measured GiB")
    drawn = table_behind(head, rows, f"Stages of all {len(runs)} runs", kind="stages")
    return f'<section><h2>Memory and versions</h2>{drawn}<p class="note">{escape(_STAGES_NOTE)}</p></section>'


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published speed-up of a model on so many workers."""

    model: str
    workers: int
    where: str
    replicas: str
    speed_up: float
    """Over data parallelism."""
    of: str
    """What was so much faster."""
    source: str


PAPER = "Narayanan et al., SOSP 2019, abstract"
OPTIMIZER = "optimizer_graph_hierarchical.py --activation_compression_ratio 1 on its repository's profile"
_STRAIGHT_4, _TEN, _TWENTY_FIVE = "1-1-1-1", "10 Gbit/s", "25 Gbit/s"


def _answer(model: str, workers: int, where: str, replicas: str, speed_up: float) -> Published:
    return Published(
        model=model, workers=workers, where=where, replicas=replicas, speed_up=speed_up,
        of="throughput, predicted", source=OPTIMIZER,
    )  # fmt: skip


PUBLISHED = (
    Published(
        model="vgg16", workers=16, where="four servers of four V100, 10 Gbit/s", replicas="15-1", speed_up=5.3,
        of="time to accuracy, at most", source=PAPER,
    ),
    _answer("vgg16", 4, _TEN, "3-1", 2.84),
    _answer("vgg16", 4, _TWENTY_FIVE, "3-1", 1.74),
    _answer("vgg16", 16, _TWENTY_FIVE, "15-1", 1.84),
    _answer("resnet50", 4, _TEN, "2-2", 1.13),
    _answer("resnet50", 4, _TWENTY_FIVE, "3-1", 1.16),
    _answer("resnet50", 16, _TWENTY_FIVE, "7-4-3-1-1", 1.08),
    _answer("gnmt-16", 4, _TEN, _STRAIGHT_4, 5.81),
    _answer("gnmt-16", 4, _TWENTY_FIVE, _STRAIGHT_4, 2.89),
    _answer("gnmt-16", 16, _TWENTY_FIVE, "1-1-1-1-1-1-1-1-1-1-1-1-3-1", 2.75),
)  # fmt: skip


def published(runs: Sequence[Facts]) -> list[Published]:
    """Returns what is published of the models and numbers of workers of these runs."""
    known = {(run.model, run.workers) for run in runs}
    return [one for one in PUBLISHED if (one.model, one.workers) in known]


_PUBLISHED_NOTE = (
    "Here: the throughput of the fastest of these runs with the same replicas, relative to the fastest data-parallel "
    "run. Both are medians, and a difference within the ± of their samples/s may be chance."
)


def published_section(runs: Sequence[Compared]) -> str:
    """Tabulates what is published of the models of these runs on as many workers; empty where that is nothing."""
    every = [run.facts for run in runs]
    rows: list[Row] = [
        (
            one.model,
            str(one.workers),
            one.where,
            one.replicas,
            one.of,
            f"{one.speed_up:g}",
            number(_reached(one, every), ".2f"),
            one.source,
        )
        for one in published(every)
    ]
    if not rows:
        return ""
    head = ("model", "workers", "network", "replicas", "of", "published times data parallelism", "here", "source")
    drawn = table(head, rows, kind="published")
    return f'<section><h2>Published</h2>{drawn}<p class="note">{escape(_PUBLISHED_NOTE)}</p></section>'


def _reached(one: Published, runs: Sequence[Facts]) -> float:
    same = [run for run in runs if (run.model, run.workers) == (one.model, one.workers)]
    found = [speed_up(run, runs) for run in same if "-".join(map(str, run.replicas)) == one.replicas]
    return max((value for value in found if not math.isnan(value)), default=math.nan)
