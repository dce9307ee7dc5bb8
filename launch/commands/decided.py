"""The values that a command line leaves to tdpp (`auto`): chosen before anything is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from conf.compose import to_experiment, to_object, with_known_keys
from conf.errors import ConfigError
from conf.schema.experiment import Experiment
from conf.schema.parallel import AUTO, Parallel
from conf.schema.partition import Shares

if TYPE_CHECKING:
    from fasop.search.batch_division import Division
    from fasop.shares.public_files import Cluster

KEYS = ("micro_batch_size", "shares")


def decided(cfg: DictConfig, words: Sequence[str] | None = None) -> tuple[Experiment, str | None]:
    """The composed configuration as an experiment, and in words what was chosen of it; `words` as of `to_experiment`.

    Raises:
        TdppError: a rule is broken, or nothing that could be chosen fits.
    """
    if not any(OmegaConf.select(cfg, f"parallel.{key}", default=None) == AUTO for key in KEYS):
        return to_experiment(cfg, words), None
    from fasop.search.batch_division import best_division, provisional  # numpy is slow to import
    from fasop.shares.of_profiles import measured_cluster

    known = with_known_keys(cfg, words)
    undecided = to_object(known, Parallel, "parallel")
    experiment, refused = None, None
    for values in provisional(undecided):
        tried = known.copy()
        for key, value in values.items():
            tried.parallel[key] = value
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
            f"{size}, one or more for each of {undecided.layout.replicas[0]} replicas; use a larger batch, or fewer "
            "replicas (parallel.data)"
        )
    cluster = measured_cluster(experiment)
    division = best_division(experiment, undecided) if cluster is None else _of_steps(cluster, experiment, undecided)
    for key, value in division.values.items():
        known.parallel[key] = value
    of_model = "" if cluster is None else "; times are those of IIDP's performance model"
    return to_experiment(known), f"{keys}: {division}{of_model}"


def _of_steps(cluster: Cluster, experiment: Experiment, undecided: Parallel) -> Division:
    """From whole steps that IIDP or JABAS measured."""
    from fasop.costs.layers import Basis
    from fasop.search.batch_division import Division
    from fasop.shares.of_profiles import solved

    given, keys = experiment.parallel, undecided.undecided
    size = None if "micro_batch_size" in keys else given.micro_batch_size
    shares = None
    if "shares" not in keys:
        shares = Shares.parse(given.shares).numbers if given.shares else (1,) * given.layout.replicas[0]
    found = solved(cluster, given.global_batch_size, size, shares)
    common = gcd(*found.counts)
    counts = Shares(tuple(count // common for count in found.counts))
    chosen: dict[str, int | str | None] = {
        "micro_batch_size": found.size,
        "shares": None if len({*counts.numbers}) == 1 else str(counts),
    }
    return Division(
        values={key: chosen[key] for key in keys},
        seconds=found.seconds,
        sizes=found.sizes,
        even=found.even,
        basis=Basis.MEASURED,
    )
