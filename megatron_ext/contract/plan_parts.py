"""What a plan is made of: nodes, places of ranks, times of a rehearsal, and how samples are made of corpora, documents
and images (docs/formats.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Dict, Iterable, List, Optional

from megatron_ext.contract.adaptive.forecast import By
from megatron_ext.contract.keys import COUNT, NOT_NEGATIVE, PART, Range, about, between, from_0, option, positive
from megatron_ext.contract.parallel_config import Parallel, Recompute, Schedule
from megatron_ext.contract.schedule.streams import Semantics


@dataclass(frozen=True)
class Corpus:
    """Indexed data and their weight in a blend."""

    prefix: str
    """The same as `data.prefix`."""
    weight: float = option(1.0, positive(), written=True)
    """The same as `data.weight`."""


@dataclass(frozen=True)
class Masking:
    """Which tokens of a sample BERT and T5 are to find, and how long samples are; as in Megatron."""

    mask_prob: float = field(metadata=about(PART))
    """The part of a sample's tokens."""
    short_seq_prob: float = field(metadata=about(between(0, 1)))
    """How often a sample aims at fewer tokens than there is room for."""
    max_ngram: int = field(metadata=about(between(1, 10**4)))
    """Words that are hidden in a row, at most."""
    full_word: bool
    """Whether all tokens of a word are hidden."""
    longer_ngrams: bool
    """Whether long runs are more frequent than short ones."""
    geometric: bool
    """Whether the lengths of runs are distributed geometrically (SpanBERT), which overrides `longer_ngrams`."""


ANSWERS = ".answers"
"""What the mask beside conversations ends in: a byte for each token, 1 where it is to be learned."""


@dataclass(frozen=True)
class Documents:
    """How samples are made where each document stands for itself, and is not a part of running text."""

    packing: bool
    """Whether several share a sample, without their seeing each other; else each has one of its own."""


@dataclass(frozen=True)
class Augment:
    """How training changes images; every change follows from the seed and the numbers of the samples."""

    padding: int = option(0, Range(0, 2**10), written=True)
    """Pixels of padding around an image, from which a random crop of the original size is taken."""
    flip: bool = option(False, written=True)
    """Mirror images left to right, with probability one half."""
    rand_augment: int = option(0, Range(0, 100), written=True)
    """Number of random operations per image (RandAugment)."""
    rand_augment_magnitude: float = option(9.0, between(0.0, 10.0), written=True)
    """Magnitude of these operations, from 0 to 10."""
    erasing: float = option(0.0, between(0.0, 1.0), written=True)
    """Probability that a rectangle of an image is replaced by noise (random erasing)."""
    mixup: float = option(0.0, from_0(1e3), written=True)
    """Mixup: alpha of the beta distribution by which pairs of images of a micro-batch are mixed; 0: off."""
    cutmix: float = option(0.0, from_0(1e3), written=True)
    """CutMix: the same for rectangles pasted from the other image; with both, one of the two is drawn each time."""


@dataclass(frozen=True)
class Node:
    """A node and the ranks that run there, or in a rehearsal those that stand for it."""

    name: str
    group: str
    gpu: str
    ranks: List[int] = field(metadata=about(NOT_NEGATIVE))


@dataclass(frozen=True)
class RunNode(Node):
    """A node that the run has."""

    environment: Dict[str, str]
    """Given to its ranks beside what all have; the node agent sets it."""


@dataclass(frozen=True)
class IslandPlan:
    """How an island cuts the model, where islands differ."""

    pipeline: int = field(metadata=about(COUNT))
    tensors: List[int] = field(metadata=about(COUNT))
    """Ranks of a tensor group, by stage."""
    partition: List[int] = field(metadata=about(NOT_NEGATIVE))
    """Layers by stage."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands: on which node, and in which stage, replica and tensor slice."""

    rank: int = field(metadata=about(NOT_NEGATIVE))
    node: int = field(metadata=about(NOT_NEGATIVE))
    local_rank: int = field(metadata=about(NOT_NEGATIVE))
    stage: int = field(metadata=about(NOT_NEGATIVE))
    dp: int = field(metadata=about(NOT_NEGATIVE))
    tp: int = field(metadata=about(NOT_NEGATIVE))
    emulates: Optional[str] = option(None, written=True)
    """In a rehearsal, the node that the rank stands for."""

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, dp {self.dp}, tp {self.tp})"


@dataclass(frozen=True)
class Streaming:
    """How micro-batches stream through the stages with the schedule `pipedream`
    (`megatron_ext.contract.schedule.streams`)."""

    user_keys = Parallel
    semantics: Semantics
    update_every: int
    depth: Optional[List[int]] = field(metadata=about(NOT_NEGATIVE))
    """Each stage's forward passes before the first backward pass; None: as many as keep all ranks busy."""


@dataclass(frozen=True)
class NodeCounts:
    """Nodes that an elastic run may choose."""

    counts: Dict[str, int]
    """Nodes of each group."""
    rest_s: float = field(metadata=about(from_0()))
    """Seconds of an iteration beside the micro-batches of its slowest replica, in which gradients are summed."""


@dataclass(frozen=True)
class Choosing:
    """How a run chooses its nodes at the end of an epoch (`adaptive.forecast`)."""

    by: By
    epoch: float = field(metadata=about(positive()))
    """Samples."""
    restart_s: float = field(metadata=about(from_0()))
    """Seconds in which nothing is trained while nodes change."""
    release: bool
    """Whether nodes that are not chosen end, so that they are free for others."""
    micro_batch_s: List[float] = field(metadata=about(positive()))
    """Predicted seconds, by node rank, of a micro-batch on one of its replicas."""
    candidates: List[NodeCounts]


@dataclass(frozen=True)
class RoundTime:
    """What a replica was measured to take for a round of its streams."""

    size: int = field(metadata=about(COUNT))
    """Samples of a micro-batch."""
    streams: int = field(metadata=about(COUNT))
    seconds: float = field(metadata=about(positive()))


@dataclass(frozen=True)
class NodeSetPlan:
    """How an elastic run is cut on some of its nodes, where a replica's stages lie on several of them."""

    user_keys = Parallel
    seconds: float = field(metadata=about(positive()))
    """What an iteration is predicted to take."""
    groups: List[str]
    """The group of each node, in the order in which ranks fill the nodes."""
    counts: List[int] = field(metadata=about(COUNT))
    """Ranks of each of these nodes."""
    tensor: int
    data: int
    pipeline: int
    chunks: int
    partition: List[int] = field(metadata=about(NOT_NEGATIVE))
    sequence_parallel: bool
    recompute: Recompute
    sharded_optimizer: bool
    hierarchical_stages: Optional[List[int]] = field(metadata=about(NOT_NEGATIVE))
    schedule: Schedule
    shares: Optional[List[int]] = field(metadata=about(COUNT))
    tensors: Optional[List[int]] = field(metadata=about(COUNT))
    replicas: Optional[List[int]] = field(metadata=about(COUNT))
    padded_vocab_size: int


@dataclass(frozen=True)
class Elastic:
    """What a run needs to go on with other nodes. Replicas are those of all nodes, also of nodes that take no part."""

    min_nodes: int = field(metadata=about(COUNT))
    """With fewer it ends."""
    ranks: List[int] = field(metadata=about(COUNT))
    """The ranks of each node when it takes part."""
    weights: List[float] = field(metadata=about(positive()))
    """How fast each replica is, in proportion."""
    prices: Optional[List[float]] = field(metadata=about(from_0()))
    """US dollars an hour of each node, where all are known."""
    choosing: Optional[Choosing]
    """None: only a loss changes the nodes."""
    streams: Optional[List[int]] = option(None, COUNT)
    """Copies of the model on each replica's GPU, where there are several."""
    micro_batch_sizes: Optional[List[List[int]]] = option(None, COUNT)
    """`AdaptConfig.micro_batch_sizes` of all replicas."""
    numbers_of_streams: Optional[List[List[List[int]]]] = option(None, COUNT)
    """`AdaptConfig.streams` of all replicas."""
    times: Optional[List[List[RoundTime]]] = None
    """What earlier starts measured of each replica, where shares follow measured times."""
    plans: Optional[List[NodeSetPlan]] = None
    """The run's own plan, then the fastest ones for fewer nodes, of which the first that fits is taken after a loss;
    None: each node has whole replicas, which share the batch anew."""

    def replicas_on(self, nodes: Iterable[int], tensor: int) -> List[int]:
        """The replicas of these nodes; each has `tensor` ranks."""
        ends = [0, *accumulate(count // tensor for count in self.ranks)]
        return [replica for node in nodes for replica in range(ends[node], ends[node + 1])]


@dataclass(frozen=True)
class RankTimes:
    """Nanoseconds that a rank takes; lists by chunk, of one micro-batch."""

    forward_ns: List[int] = field(metadata=about(NOT_NEGATIVE))
    backward_ns: List[int] = field(metadata=about(NOT_NEGATIVE))
    send_forward_ns: int = field(metadata=about(NOT_NEGATIVE))
    send_backward_ns: int = field(metadata=about(NOT_NEGATIVE))
    busy_forward_ns: int
    """For how much of `send_forward_ns` the link takes no other message."""
    busy_backward_ns: int
    one_way_out: bool
    """Whether messages to both neighbours leave by one link."""
    grads_all_reduce_ns: int = field(metadata=about(NOT_NEGATIVE))
    embedding_all_reduce_ns: int = field(metadata=about(NOT_NEGATIVE))
    optimizer_ns: int = field(metadata=about(NOT_NEGATIVE))
    params_all_gather_ns: int = field(metadata=about(NOT_NEGATIVE))
    """Handing out the weights of a sharded optimizer; 0 without one."""


@dataclass(frozen=True)
class TimesOfSize:
    """What ranks take with micro-batches of another size than the plan's."""

    size: int = field(metadata=about(COUNT))
    """Samples."""
    ranks: List[RankTimes]


@dataclass(frozen=True)
class TimesInStreams:
    """What ranks take while a replica has several streams. Lists by rank."""

    size: int = field(metadata=about(COUNT))
    """Samples of a micro-batch."""
    ranks: List[RankTimes]
    """With one micro-batch at a time."""
    rates: List[List[float]] = field(metadata=about(positive()))
    """Micro-batches in a time, over those of one at a time, with 1, 2, … of them beside each other."""
    copy_ns: List[int] = field(metadata=about(NOT_NEGATIVE))
    """Time that adding up the gradients of a further stream takes."""


@dataclass(frozen=True)
class NoisePoint:
    """What is expected of the gradient's noise."""

    samples: float = field(metadata=about(from_0()))
    """Consumed before."""
    scale: float = field(metadata=about(positive()))
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
