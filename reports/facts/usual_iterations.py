"""How long an iteration of a run takes by its log, and which iterations are usual: those that take about as long."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from conf.run_folder.iteration_time import IterationTime, LineTime, iteration_time
from reports.readers.record import Record

Floats = NDArray[np.float64]


def time_of(record: Record) -> IterationTime | None:
    """What pages show as a run's iteration time; None before the first line of its log."""
    return iteration_time(_lines(record))


def _lines(record: Record) -> Iterator[LineTime]:
    metrics = record.metrics
    if "elapsed_ms" not in metrics:
        return
    samples = metrics.get("consumed_samples", [None] * len(metrics))
    for iteration, elapsed_ms, consumed in zip(metrics["iteration"], metrics["elapsed_ms"], samples, strict=True):
        if not pd.isna(elapsed_ms):
            yield LineTime(
                iteration=int(iteration),
                elapsed_ms=float(elapsed_ms),
                consumed_samples=None if consumed is None or pd.isna(consumed) else int(consumed),
            )


def batches(record: Record, iterations: NDArray[np.int64]) -> Floats:
    """(n,) samples of each of these iterations of a run whose batch changes; else 1, since times are then compared per
    iteration."""
    if record.decisions:
        after = np.array([one.iteration for one in record.decisions])
        sizes = np.array([record.decisions[0].before, *(one.global_batch_size for one in record.decisions)], np.float64)
        found = sizes[np.searchsorted(after, iterations, side="left")]
    elif (known := time_of(record)) is not None and known.per_sample:
        consumed = record.known("consumed_samples").astype("float64")
        logged = consumed.index.to_numpy("int64")
        each = np.diff(consumed.to_numpy()) / np.diff(logged)
        each = np.concatenate(
            [each[:1], each]
        )  # of a run that began at another one's checkpoint the first does not tell
        found = each[np.minimum(np.searchsorted(logged, iterations, side="left"), len(each) - 1)]
    else:
        found = np.ones(len(iterations))
    return found if len(set(found.tolist())) > 1 else np.ones(len(iterations))


def usual_first(
    record: Record | None, iterations: NDArray[np.int64], lasts_ms: Floats, samples: Floats
) -> NDArray[np.int64]:
    """(n,) which of these iterations to look at first to understand the run: those nearest to the median of its log.

    An iteration must be near the median by its events as well as by its line of the log, which may be the mean of
    several iterations. Where the batch changes, times are per sample, and iterations of the most frequent batch come
    first.

    Args:
        lasts_ms: (n,) of each by its events, from the end of the iteration before to its own.
        samples: (n,) `batches`.
        record: None where no log is known.
    """
    if not len(iterations):
        return np.zeros(0, np.int64)
    by_events = lasts_ms / samples
    middle, far = float(np.median(by_events)), np.zeros(len(iterations))
    known = None if record is None else time_of(record)
    if record is not None and known is not None and known.per_sample == bool((samples != 1).any()):
        # What lines count and events do not must not make a long iteration usual.
        middle = float(np.clip(known.ms, *np.quantile(by_events, [0.25, 0.75])))
        far = _off(_of_lines(record, known, iterations), known.ms)
    off = _off(by_events, middle)
    far = np.maximum(off, np.nan_to_num(far, nan=np.inf))
    sizes, counts = np.unique(samples, return_counts=True)
    other = samples != sizes[int(counts.argmax())]
    return np.lexsort((off, far, other)).astype(np.int64)


def _off(values: Floats, middle: float) -> Floats:
    """(n,) how far each is from the middle, as a share of it."""
    return np.abs(values - middle) / middle if middle > 0 else np.abs(values)


def _of_lines(record: Record, time: IterationTime, iterations: NDArray[np.int64]) -> Floats:
    """(n,) ms of the line that each is in, per iteration or sample; NaN where there is none that counts."""
    logged = record.known("elapsed_ms").index.to_numpy("int64")
    each = np.concatenate([np.full(len(logged) - len(time.each_ms), np.nan), time.each_ms, [np.nan]])
    return np.asarray(each[np.searchsorted(logged, iterations, side="left")], np.float64)
