"""How long everything takes that a rehearsal does not do: what a search predicts of the plan
(fasop/simulation/predict.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from conf.schema.experiment import Experiment
from megatron_ext.contract.plan_parts import RankTimes, TimesInStreams

if TYPE_CHECKING:
    from fasop.costs.training import PlacedTraining
    from fasop.simulation.ranks.rank_times import RankDurations


def rehearsal_times(experiment: Experiment, micro_batch_size: int | None = None) -> list[RankTimes]:
    """Returns the times by rank, of replicas with one stream; None: of the micro-batches that the plan has.

    A rank takes its own GPU's time to compute, which of a stage on several kinds of GPU is not the slowest one's. All
    else, which ranks do together, takes what is predicted of the stage.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for a tensor size.
    """
    from fasop.simulation.predict import planned  # with numpy: no other launch needs it

    return _by_rank(planned(experiment), micro_batch_size, in_streams=False)


def times_in_streams(experiment: Experiment, micro_batch_size: int, most: int) -> TimesInStreams:
    """What ranks take while replicas have up to so many streams, by the gain that was measured on their GPUs.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for a tensor size.
    """
    from fasop.costs.stream_rates import stream_rates
    from fasop.simulation.predict import planned

    placed = planned(experiment)
    model, precision = placed.training.model, placed.training.precision
    by_kind = {kind.name: stream_rates(kind.profile, model, precision, micro_batch_size) for kind in placed.kinds}
    rates = [by_kind[node.name] for node in placed.nodes for _ in range(node.gpus)]
    return TimesInStreams(
        size=micro_batch_size,
        ranks=_by_rank(placed, micro_batch_size, in_streams=True),
        rates=[[of.rate(streams) for streams in range(1, most + 1)] for of in rates],
        copy_ns=[_ns(of.copy_s) for of in rates],
    )


def doubts(experiment: Experiment) -> list[str]:
    """What is hard to believe of the times that a rehearsal takes, or is not a measurement, in words.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for a tensor size.
    """
    from fasop.costs.profiles import doubts
    from fasop.simulation.predict import planned
    from fasop.simulation.ranks.rank_durations import basis

    plan = planned(experiment)
    return [*doubts.doubts(plan.training, sorted(plan.kinds, key=lambda kind: kind.name), {basis(plan)})]


def _by_rank(placed: PlacedTraining, micro_batch_size: int | None, *, in_streams: bool) -> list[RankTimes]:
    """Returns the times of one micro-batch by rank; `in_streams` as of `Training`."""
    from fasop.simulation.ranks.rank_durations import by_rank

    sized = placed if micro_batch_size is None else placed.sized(micro_batch_size)
    return [_in_ns(rank) for rank in by_rank(replace(sized, training=replace(sized.training, in_streams=in_streams)))]


def _in_ns(rank: RankDurations) -> RankTimes:
    times = rank.times
    return RankTimes(
        forward_ns=[_ns(seconds) for seconds in times.forward],
        backward_ns=[_ns(seconds) for seconds in times.backward],
        send_forward_ns=_ns(times.send_forward),
        send_backward_ns=_ns(times.send_backward),
        busy_forward_ns=_ns(times.sends("forward-send")[1]),
        busy_backward_ns=_ns(times.sends("backward-send")[1]),
        one_way_out=times.one_way_out,
        grads_all_reduce_ns=_ns(rank.gradients),
        embedding_all_reduce_ns=_ns(rank.embedding),
        optimizer_ns=_ns(rank.optimizer - rank.weights),
        params_all_gather_ns=_ns(rank.weights),
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
