"""The values that a command line leaves to tdpp (`auto`): chosen before anything is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from conf.compose import to_experiment, to_object, with_known_keys
from conf.engine_choice import with_engine
from conf.errors import ConfigError, UsageError
from conf.reading.own_folders import SUFFIX, own_folders
from conf.reading.user_files import config_dirs
from conf.schema.experiment import Experiment
from conf.schema.parallel import Parallel
from conf.schema.values.partition import AUTO, Shares, run_length_text

if TYPE_CHECKING:
    from fasop.search.shares.batch_division import BatchDivision
    from fasop.shares.public_files import Cluster
    from launch.commands.launching.excluded import Known


KEYS = ("micro_batch_size", "shares", "streams")


def resolve_auto(
    cfg: DictConfig, words: Sequence[str] | None = None, known: Known | None = None
) -> tuple[Experiment, str | None]:
    """The composed configuration as an experiment, and in words what was chosen of it; `words` as of `to_experiment`.
    `known` keeps what was found of hosts from one combination of a sweep to the next.

    Raises:
        TdppError: a rule is broken, or nothing that could be chosen fits.
    """
    experiment, chosen = with_engine(cfg, lambda one: _with_plan(one, words))
    if AUTO in experiment.cluster.exclude:
        from launch.commands.launching.excluded import with_excluded  # few launches look at all runs

        runs = Path(experiment.runs_dir)
        cluster, left_out = with_excluded(experiment.cluster, experiment.executor.kind, runs, known)
        experiment = replace(experiment, cluster=cluster)
        chosen = "; ".join(filter(None, [chosen, left_out]))
    return experiment, chosen


def _with_plan(cfg: DictConfig, words: Sequence[str] | None) -> tuple[Experiment, str | None]:
    """The same for what of the plan is left to tdpp."""
    if not any(OmegaConf.select(cfg, f"parallel.{key}", default=None) == AUTO for key in KEYS):
        return to_experiment(cfg, words), None
    from fasop.search.shares.batch_division import best_division, provisional  # numpy is slow to import
    from fasop.shares.of_profiles import measured_cluster

    known = with_known_keys(cfg, words)
    undecided = to_object(known, Parallel, "parallel")
    experiment, refused = None, None
    for values in provisional(undecided):
        tried = known.copy()
        for key, value in values.items():
            tried.parallel[key] = value
        if "streams" in undecided.undecided:
            tried.parallel.streams = None
        try:
            experiment = to_experiment(tried)
        except ConfigError as error:  # such as a rule for micro-batches of 1
            refused = refused or error
        else:
            break
    keys = " ".join(f"parallel.{key}={AUTO}" for key in undecided.undecided)
    if experiment is None:
        size = "" if "micro_batch_size" in undecided.undecided else f" of {undecided.micro_batch_size} samples"
        raise refused or ConfigError(
            f"{keys}: parallel.global_batch_size={undecided.global_batch_size} must be a whole number of micro-batches"
            f"{size}, at least one for each replica"
            + (
                f"; parallel.streams={undecided.streams} must divide the number of each replica"
                if max(undecided.streams_of) > 1
                else ""
            )
            + "; use a larger batch, or fewer replicas (parallel.data)"
        )
    in_streams = "streams" in undecided.undecided
    cluster = measured_cluster(experiment, in_streams or max(undecided.streams_of) > 1)
    if cluster is not None:
        division, remark = _of_steps(cluster, experiment, undecided), "; times are those of IIDP's performance model"
    else:
        division = best_division(experiment, undecided)
        division, remark = _with_streams(experiment, undecided, division) if in_streams else (division, "")
        remark += _estimated(experiment)
    for key, value in division.values.items():
        known.parallel[key] = value
    return to_experiment(known), f"{keys}: {division}{remark}"


def _estimated(experiment: Experiment) -> str:
    """Why times are estimates, and how to get better ones; nothing where all are measured."""
    from fasop.costs.layers import why_not_measured
    from fasop.simulation.predict import planned

    placed = planned(experiment)
    reasons = [why_not_measured(node.gpu, node.profile, placed.training) for node in placed.nodes]
    known = [*dict.fromkeys(filter(None, reasons))]
    if not known:
        return ""
    return f" ({'; '.join(known)}): measure them with 'tdpp profile', and add profile=NAME"


def _with_streams(experiment: Experiment, undecided: Parallel, alone: BatchDivision) -> tuple[BatchDivision, str]:
    """What takes least with several streams, if that is less than `alone`, with one; and in words how they compare."""
    from fasop.shares.own_streams import best_in_streams
    from fasop.simulation.predict import planned

    found = best_in_streams(planned(experiment), undecided, lambda parallel: replace(experiment, parallel=parallel))
    if found is None:
        return replace(alone, values={**alone.values, "streams": None}), "; streams gain nothing by the measurements"
    time = f"{found.seconds * 1e3:.1f} ms with parallel.streams={found.streams}"
    if found.seconds >= alone.seconds:
        return replace(alone, values={**alone.values, "streams": None}), f"; with streams it would take {time} at best"
    chosen = {"micro_batch_size": found.micro_batch_size, "shares": found.shares, "streams": found.streams}
    division = replace(
        alone,
        values={key: chosen[key] for key in undecided.undecided},
        seconds=found.seconds,
        sizes=tuple(sorted({*alone.sizes, *found.sizes})) if alone.sizes else (),
        basis=max(alone.basis, found.basis),
    )
    return division, f"; one stream per GPU would take {alone.seconds * 1e3:.1f} ms at best"


def _of_steps(cluster: Cluster, experiment: Experiment, undecided: Parallel) -> BatchDivision:
    """Divides the batch by whole steps that IIDP or JABAS measured."""
    from fasop.costs.layers import Basis
    from fasop.search.shares.batch_division import BatchDivision
    from fasop.shares.of_profiles import solved

    given, keys = experiment.parallel, undecided.undecided
    size = None if "micro_batch_size" in keys else given.micro_batch_size
    shares = None
    if "shares" not in keys:
        shares = Shares.parse(given.shares).numbers if given.shares else (1,) * given.layout.replicas[0]
    streams = None if "streams" in keys or max(undecided.streams_of) == 1 else undecided.streams_of
    found = solved(cluster, given.global_batch_size, size, shares, in_streams="streams" in keys, streams_of=streams)
    common = gcd(*found.counts)
    counts = Shares(tuple(count // common for count in found.counts))
    chosen: dict[str, int | str | None] = {
        "micro_batch_size": found.size,
        "shares": None if len({*counts.numbers}) == 1 else str(counts),
        "streams": None if max(found.streams) == 1 else run_length_text(found.streams, "-"),
    }
    return BatchDivision(
        values={key: chosen[key] for key in keys},
        seconds=found.seconds,
        sizes=found.sizes,
        even=found.even,
        basis=Basis.MEASURED,
    )


_STARTS_NOTHING = ("-c", "--cfg", "-i", "--info", "-h", "--help", "--hydra-help", "--version")


def require_choice(argv: Sequence[str]) -> None:
    """Raises UsageError where no word says what to launch, and there are clusters of one's own: the demo would take
    this machine, perhaps a cluster's login node."""
    folders, words = config_dirs(argv)
    if any("=" in word or word.startswith(("~", *_STARTS_NOTHING)) for word in words):
        return
    folders = [*own_folders(), *folders]
    clusters, experiments = (
        sorted({file.stem for folder in folders for file in folder.glob(f"{group}/*{SUFFIX}")})
        for group in ("cluster", "experiment")
    )
    if clusters:
        yours = f"experiment={experiments[0]}" if experiments else f"cluster={clusters[0]} model=NAME data=NAME"
        raise UsageError(
            f"tdpp launch: no experiment given; use {yours} for your own cluster "
            f"({', '.join(clusters)}), or experiment=demo for the demo on this machine"
        )
