"""What a plan is made of: nodes, places of ranks, data, times of a rehearsal (docs/formats.md)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Dict, Iterable, List, Optional


@dataclass(frozen=True)
class Corpus:
    """Indexed data and their weight in a blend."""

    prefix: str
    weight: float


@dataclass(frozen=True)
class Masking:
    """Which tokens of a sample BERT and T5 are to find, and how long samples are; as in Megatron."""

    mask_prob: float
    """The part of a sample's tokens."""
    short_seq_prob: float
    """How often a sample aims at fewer tokens than there is room for."""
    max_ngram: int
    """Words that are hidden in a row, at most."""
    full_word: bool
    """Whether all tokens of a word are hidden."""
    longer_ngrams: bool
    """Whether long runs are more frequent than short ones."""
    geometric: bool
    """Whether the lengths of runs are distributed geometrically (SpanBERT), which overrides `longer_ngrams`."""


@dataclass(frozen=True)
class Augment:
    """How training changes images; every change follows from the seed and the numbers of the samples."""

    padding: int
    """Pixels around an image, of which a part of its own size is cut at random."""
    flip: bool
    """Whether every other image is mirrored, left to right."""
    rand_augment: int
    """Operations that are drawn for each image (Cubuk et al. 2020)."""
    rand_augment_magnitude: float
    """Of them, from 0 to 10."""
    erasing: float
    """How often a rectangle of an image becomes noise (Zhong et al. 2020)."""
    mixup: float
    """Alpha of the beta distribution by which pairs of a micro-batch's images are mixed; 0: they are not."""
    cutmix: float
    """The same for rectangles that are taken from the other image; with both, either of them by turns at random."""


@dataclass(frozen=True)
class Node:
    """A node and the ranks that run there, or in a rehearsal those that stand for it."""

    name: str
    group: str
    gpu: str
    ranks: List[int]


@dataclass(frozen=True)
class RunNode(Node):
    """A node that the run has."""

    environment: Dict[str, str]
    """Given to its ranks beside what all have; the node agent sets it."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands: on which node, and in which stage, replica and tensor slice."""

    rank: int
    node: int
    local_rank: int
    stage: int
    dp: int
    tp: int
    emulates: Optional[str] = None
    """In a rehearsal, the node that the rank stands for."""

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, dp {self.dp}, tp {self.tp})"


@dataclass(frozen=True)
class Streaming:
    """How micro-batches stream through the stages with the schedule `pipedream`
    (`megatron_ext.contract.schedule.streams`)."""

    semantics: str
    """Which version of the weights a micro-batch meets."""
    update_every: int
    """Rounds of a stage's replicas between two updates."""
    depth: Optional[List[int]]
    """By stage, forward passes before the first backward pass; None: as many as keep all ranks busy."""


@dataclass(frozen=True)
class NodeCounts:
    """Nodes that an elastic run may choose."""

    counts: Dict[str, int]
    """By group."""
    rest_s: float
    """Seconds of an iteration beside the micro-batches of its slowest replica, in which gradients are summed."""


@dataclass(frozen=True)
class Choosing:
    """How a run chooses its nodes at the end of an epoch (`adaptive.forecast`)."""

    by: str
    """What is to be least, of the next epoch: one of `adaptive.forecast.GOALS`."""
    epoch: float
    """Samples."""
    restart_s: float
    """Seconds in which nothing is trained while nodes change."""
    release: bool
    """Whether nodes that are not chosen end, so that they are free for others."""
    micro_batch_s: List[float]
    """By node rank, predicted seconds of a micro-batch on one of its replicas."""
    candidates: List[NodeCounts]


@dataclass(frozen=True)
class RoundTime:
    """What a replica was measured to take for a round of its streams."""

    size: int
    """Samples of a micro-batch."""
    streams: int
    seconds: float


ELASTIC_OPTIONS: Dict[str, Any] = {
    "streams": None,
    "micro_batch_sizes": None,
    "numbers_of_streams": None,
    "times": None,
}
"""What `Elastic` may lack, and has then."""


@dataclass(frozen=True)
class Elastic:
    """What a run needs to go on with other nodes. Replicas are those of all nodes, also of nodes that take no part."""

    min_nodes: int
    """With fewer it ends."""
    ranks: List[int]
    """By node rank, of a node that takes part."""
    weights: List[float]
    """By replica, how fast it is, in proportion."""
    prices: Optional[List[float]]
    """By node rank, US dollars an hour, where all are known."""
    choosing: Optional[Choosing]
    """None: only a loss changes the nodes."""
    streams: Optional[List[int]] = None
    """By replica, copies of the model on its GPU, where there are several."""
    micro_batch_sizes: Optional[List[List[int]]] = None
    """By replica, `AdaptConfig.micro_batch_sizes`."""
    numbers_of_streams: Optional[List[List[List[int]]]] = None
    """By replica, `AdaptConfig.streams`."""
    times: Optional[List[List[RoundTime]]] = None
    """By replica, what earlier starts measured, where shares follow measured times."""

    def replicas_on(self, nodes: Iterable[int], tensor: int) -> List[int]:
        """The replicas of these nodes; each has `tensor` ranks."""
        ends = [0, *accumulate(count // tensor for count in self.ranks)]
        return [replica for node in nodes for replica in range(ends[node], ends[node + 1])]


@dataclass(frozen=True)
class RankTimes:
    """Nanoseconds that a rank takes; lists by chunk, of one micro-batch."""

    forward_ns: List[int]
    backward_ns: List[int]
    send_forward_ns: int
    send_backward_ns: int
    busy_forward_ns: int
    """For how much of `send_forward_ns` the link takes no other message."""
    busy_backward_ns: int
    one_way_out: bool
    """Whether messages to both neighbours leave by one link."""
    grads_all_reduce_ns: int
    embedding_all_reduce_ns: int
    optimizer_ns: int
    params_all_gather_ns: int
    """Handing out the weights of a sharded optimizer; 0 without one."""


@dataclass(frozen=True)
class TimesOfSize:
    """What ranks take with micro-batches of another size than the plan's."""

    size: int
    """Samples."""
    ranks: List[RankTimes]


@dataclass(frozen=True)
class TimesInStreams:
    """What ranks take while a replica has several streams. Lists by rank."""

    size: int
    """Samples of a micro-batch."""
    ranks: List[RankTimes]
    """With one micro-batch at a time."""
    rates: List[List[float]]
    """Micro-batches in a time, over those of one at a time, with 1, 2, … of them beside each other."""
    copy_ns: List[int]
    """Of adding up the gradients of a further stream."""


@dataclass(frozen=True)
class NoisePoint:
    """What is expected of the gradient's noise."""

    samples: float
    """Consumed before."""
    scale: float
    """The noise scale, in samples."""


@dataclass(frozen=True)
class RehearsalConfig:
    """What passes time instead of computing."""

    clock: str
    nodes: List[Node]
    ranks: List[RankTimes]
    other_sizes: Optional[List[TimesOfSize]] = None
    """Where micro-batches may have other sizes than the plan's."""
    noise: Optional[List[NoisePoint]] = None
    """What is measured where the batch follows it, samples upwards."""
    in_streams: Optional[List[TimesInStreams]] = None
    """Where replicas may have several streams: one for each size of micro-batches."""
