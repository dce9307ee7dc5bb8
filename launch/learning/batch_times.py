"""What an iteration of a plan takes by its batch, where that adapts."""

from __future__ import annotations

from conf.schema.experiment import Experiment
from megatron_ext.contract.adaptive.shares import fastest
from megatron_ext.contract.schedule.deal import Division, several


class BatchTimes:
    """Predicted of a plan on its cluster, with the shares of its replicas."""

    def __init__(self, experiment: Experiment) -> None:
        """Raises:
        ConfigError: a profile cannot be read.
        SearchError: the times cannot be predicted.
        """
        from fasop.trainings.placed_nodes import node_sets

        (own,), _ = node_sets(experiment, [experiment.node_order])
        self._nodes, self._size = own.nodes, experiment.parallel.micro_batch_size

    def seconds(self, micro_batches: int, measures: bool) -> float:
        """Of an iteration with so many, or of one that measures the noise of its gradient."""
        weights = self._nodes.weights
        shares = fastest([1.0 / weight for weight in weights], micro_batches)
        division = Division(shares, (self._size,) * len(shares), several(self._nodes.streams))
        return self._nodes.seconds(division, measures)
