"""How much of the gradients' all-reduce the last backward pass hides (megatron_ext/engine/gradients/reduce.py).

Gradients are summed in buckets, the last layer's first, each as soon as it is complete, one after another. So what is
left of the all-reduce after the backward pass is at least the last bucket, and what does not fit between the moment at
which the first bucket is complete and the end of the pass; and never more than all of it:
`min(whole, max(whole - hidden, last))`.

Where weights are updated bucket by bucket (train.overlap_optimizer), the steps of all buckets but the last one hide as
much of what is left as they take, for they are there to be made while other buckets are summed.
"""

from __future__ import annotations

from conf.schema.model import Model
from fasop.costs.blocks import blocks_of
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.sizes import embedding_parameters, layer_parameters
from megatron_ext.contract.parallel_config import BUCKET_BYTES

SUM_BYTES = 4
"""Bytes of a gradient, as tdpp's engine sums it."""
LEAST = 1e-9
"""Buckets of a layer that has no weights."""
LARGE_PARTS = 3
"""Large parts of a layer: the two matrices of the MLP, and the attention's together, with a third of the weights
each."""


def buckets_per_layer(model: Model, tensor: int, kind: int = 0) -> float:
    """Less than 1 where a bucket holds several layers; of a user's module one for a block, at most."""
    most = 1.0 if isinstance(model, MeasuredModule) else float(LARGE_PARTS)
    return min(most, SUM_BYTES * layer_parameters(model, tensor, kind) / BUCKET_BYTES)


def first_bucket_share(model: MeasuredModule) -> float:
    """The part of a module's backward pass after which the first bucket is complete, if weights are spread evenly over
    it: of blocks that have hardly any, no number of layers says so."""
    weights = SUM_BYTES * sum(block.parameters for block in model.sequence)
    return min(1.0, BUCKET_BYTES / max(1, weights))


def first_bucket_layers(model: Model, tensor: int, kind: int = 0) -> float:
    """Return of how many layers the gradients must be complete before any can be summed."""
    return 1 / max(LEAST, buckets_per_layer(model, tensor, kind))


def last_bucket_parameters(model: Model, tensor: int, *, first: bool) -> float:
    """Count the parameters of a stage's last bucket; that of the first stage has the embeddings, which are complete at
    the very end. Where layers differ, of the largest kind."""
    if first and not isinstance(model, MeasuredModule):
        return embedding_parameters(model, tensor)
    kinds = range(len(blocks_of(model).kinds))
    if isinstance(model, MeasuredModule):  # whose parameters nothing is known of but how many a block has
        return max(BUCKET_BYTES / SUM_BYTES, *(layer_parameters(model, tensor, kind) for kind in kinds))
    return max(layer_parameters(model, tensor, kind) / buckets_per_layer(model, tensor, kind) for kind in kinds)
