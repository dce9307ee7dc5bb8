"""`tdpp search iidp=FILE`: unequal shares from a configuration and profiles of IIDP or JABAS."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from conf.reading.values import one_of, parse_key_values, path, whole
from fasop.errors import SearchError
from launch.screen import print_table, remark

if TYPE_CHECKING:
    from fasop.shares.performance import WeightSync
    from fasop.shares.public_files import Cluster

KEY = "iidp"


class Overlap(StrEnum):
    auto = "auto"
    true = "true"
    false = "false"


WORDS = {
    KEY: path,
    "parallel.global_batch_size": whole,
    "parallel.micro_batch_size": whole,
    "train.overlap_optimizer": one_of(Overlap),
    "unit": whole,
}


def asked(argv: Sequence[str]) -> bool:
    """Whether a command line of `tdpp search` is about such a configuration."""
    return any(word.startswith(f"{KEY}=") for word in argv)


def weight_sync(given: Overlap, cluster: Cluster) -> WeightSync:
    """Return when the workers' weights are updated; `auto` follows the public rule."""
    from fasop.shares.performance import WeightSync, recommended

    known = {Overlap.true: WeightSync.overlap, Overlap.false: WeightSync.sequential}
    return known.get(given) or recommended(cluster.buckets_mib)


def main(argv: Sequence[str]) -> int:
    """Prints the best solution. Raises SearchError: a word or a file cannot be read, or the batch cannot be shared
    out."""
    from fasop.shares.adaptive_keys import adaptive_words
    from fasop.shares.json_files import of_word
    from fasop.shares.performance import WeightSync
    from fasop.shares.public_files import read_cluster
    from fasop.shares.solution import best

    given, others = parse_key_values(argv, WORDS, SearchError)
    file: Path = given[KEY]
    if others:
        raise SearchError(
            f"{KEY}={file} does not take {others[0]}, only {', '.join(word for word in WORDS if word != KEY)}"
        )
    with of_word(KEY, file):
        cluster = read_cluster(file)
    batch = given.get("parallel.global_batch_size", cluster.smallest_batch)
    if batch is None:
        raise SearchError(f"{KEY}={file} needs a global batch: add parallel.global_batch_size=512, for example")
    with of_word(KEY, file):
        adapting = adaptive_words(file, batch)
    sync = weight_sync(given.get("train.overlap_optimizer", Overlap.auto), cluster)
    solution = best(cluster, batch, sync, given.get("parallel.micro_batch_size"), given.get("unit"))
    print(solution.line())
    print_table(
        ["server", "GPUs", "GPU", "micro-batches", "workers", "accumulation", "of the batch", "ms"],
        [
            [
                share.server.name,
                str(share.gpus),
                share.server.gpu,
                str(share.micro_batches),
                str(share.workers),
                str(share.accumulation),
                f"{share.gpus * share.micro_batches / solution.micro_batches:.1%}",
                f"{share.seconds * 1e3:.1f}",
            ]
            for share in solution.shares
        ],
    )
    remark(
        f"an iteration of {solution.seconds * 1e3:.1f} ms, {batch / solution.seconds:,.0f} samples/s; by IIDP's "
        f"performance model no other measured local batch size, shares, workers or accumulation is faster"
    )
    side_by_side = "its workers side by side, as streams"
    if sync is WeightSync.overlap:
        side_by_side += ", which update only after all sums"
    ways = (side_by_side, "its micro-batches one after another")
    runs = solution.runs(cluster)
    for way, run in zip(ways if len(runs) > 1 else ("the same shares",), runs, strict=True):
        remark(f"{way}, {run.seconds * 1e3:.1f} ms in a run: {' '.join(run.words)}")
    if adapting:
        remark(f"to adapt the batch as there, with train.epochs or train.samples: {' '.join(adapting)}")
    return 0
