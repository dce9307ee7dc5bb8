"""What plan.json holds: its keys, and whether its content is a plan by all rules (docs/formats.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from megatron_ext.contract import parallel_config
from megatron_ext.contract.adaptive.config import AdaptConfig
from megatron_ext.contract.keys import COUNT, NOT_NEGATIVE, about, between
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan_check import PlanFault, Values, check_object, fault, require
from megatron_ext.contract.plan_parts import (
    Augment,
    Corpus,
    Documents,
    Elastic,
    IslandPlan,
    Masking,
    Place,
    RehearsalConfig,
    RunNode,
    Streaming,
)
from megatron_ext.contract.rules import batch, engine, layout, memory, training
from megatron_ext.contract.rules.engine import ENGINES, MEGATRON_LM, TDPP
from megatron_ext.contract.train_config import TrainConfig


def check_rules(plan: Values) -> None:
    """Checks what values have to do with each other, as far as they are there; each alone is known to be right. Raises
    PlanFault: a rule does not hold."""
    for part in (batch, memory, layout, training, engine):
        for keys, rule in part.RULES:
            for broken in rule(plan) if all(key in plan for key in keys) else ():
                raise broken if isinstance(broken, PlanFault) else fault(*broken)


VERSION = 2
EVEN = 1
"""The version that plans have whose stages and replicas are all alike: what there is to know of them has not changed
since."""
SINCE_VERSION_2 = (
    *("islands", "island_plans", "shares", "streams", "tensors", "replicas", "streaming", "adapt", "elastic", "zeros"),
    "offloads",
)


@dataclass(frozen=True)
class Content:
    """What plan.json holds beside its version.

    Of the keys that a user gives, it has what a launch made of them: numbers where they were texts.
    """

    user_keys = parallel_config.Parallel
    run: str
    tensor: int
    """Ranks of a tensor group; where stages differ, of the largest."""
    data: int
    """Ranks of a stage that have the same weights: replicas times `context`; where stages differ, of the largest."""
    pipeline: int
    chunks: int
    partition: List[int] = field(metadata=about(NOT_NEGATIVE))
    expert: Optional[int] = field(metadata=about(COUNT, written=False))
    """Ranks that share the experts of a stage out, replicas that follow each other; null: each has all of them."""
    context: Optional[int] = field(metadata=about(COUNT, written=False))
    """Ranks of a replica that share its sequences, which follow each other among the `data`; null: 1."""
    engine_options: Optional[Dict[str, object]] = field(metadata=about(written=False))
    """Fields of megatron.core's TransformerConfig, beside what the plan says."""
    script: Optional[List[str]] = field(metadata=about(written=False))
    """What a rank runs with engine=megatron_lm: the path of pretrain_gpt.py, and its options."""
    sequence_parallel: bool
    recompute: parallel_config.Recompute
    sharded_optimizer: bool
    zero: Optional[int] = field(
        metadata=about(between(parallel_config.SCATTERED, parallel_config.GATHERED), written=False)
    )
    """2, where a replica keeps the sums of its share of the gradients alone, too, with a sharded optimizer; 3, where it
    does so with weights, too; null: they are whole. Where stages differ, the largest."""
    zeros: Optional[List[int]] = field(metadata=about(between(0, parallel_config.GATHERED), written=False))
    """The same by stage, where stages differ: 1 with a sharded optimizer alone, 0 where all replicas keep all; since
    version 2."""
    shards: Optional[List[List[int]]] = field(metadata=about(COUNT, written=False))
    """For each stage, the proportions in which its replicas keep what they share out; null: all are equal."""
    offload: Optional[parallel_config.Offload] = field(metadata=about(written=False))
    """Null: none. Where stages differ, what any of them has."""
    offloads: Optional[List[parallel_config.Offload]] = field(metadata=about(written=False))
    """The same by stage, where stages differ; since version 2."""
    reduce_dtype: Optional[parallel_config.ReduceDtype] = field(metadata=about(written=False))
    """Null: fp32."""
    compress: Optional[parallel_config.Compress] = field(metadata=about(written=False))
    """Null: messages between stages are sent as they are."""
    scattered_cuts: Optional[List[int]] = field(metadata=about(NOT_NEGATIVE, written=False))
    """Stages whose tensor groups send each rank's part of a message alone to the next stage; null: none."""
    hierarchical_stages: Optional[List[int]] = field(metadata=about(NOT_NEGATIVE, written=False))
    """Stages whose replicas sum gradients within each node first, and then across nodes; null: none."""
    schedule: parallel_config.Schedule
    schedule_file: Optional[str]
    """In the plan's folder."""
    micro_batch_size: int
    global_batch_size: int
    shares: Optional[List[int]] = field(metadata=about(COUNT, written=False))
    """Micro-batches that each replica takes in an iteration, where they are not all equal; since version 2."""
    streams: Optional[List[int]] = field(metadata=about(COUNT, written=False))
    """Copies of the model on each replica's GPU, where there are several; since version 2."""
    islands: Optional[List[int]] = field(metadata=about(COUNT, written=False))
    """Replicas of each island, with train.sync_every; since version 2."""
    island_plans: Optional[List[IslandPlan]] = field(metadata=about(written=False))
    """How each island is cut, where they differ; `pipeline` is then the most stages of any, `tensor` the largest group
    and `partition` is empty; since version 2."""
    tensors: Optional[List[int]] = field(metadata=about(COUNT, written=False))
    """Ranks of a tensor group by stage, where stages differ; since version 2."""
    replicas: Optional[List[int]] = field(metadata=about(COUNT, written=False))
    """Replicas by stage, where stages differ; since version 2."""
    streaming: Optional[Streaming] = field(metadata=about(written=False))
    """With the schedule `pipedream`; since version 2."""
    adapt: Optional[AdaptConfig] = field(metadata=about(written=False))
    """Where the batch, or its shares, change while the run goes on; since version 2."""
    elastic: Optional[Elastic] = field(metadata=about(written=False))
    """Where the run goes on without a node that is lost; since version 2."""
    master_port: Optional[int] = field(metadata=about(between(1, 65535)))
    meeting_timeout_s: int = field(metadata=about(COUNT))
    """How long ranks wait for all the others before they begin."""
    nodes: List[RunNode]
    """The nodes; an elastic run also has those that take no part, without ranks."""
    ranks: List[Place]
    model: ModelConfig
    blocks: Optional[List[str]] = field(metadata=about(written=False))
    """The names of the counted blocks, where a family has no rule for them: of a module, where it was looked at before
    the start."""
    train: TrainConfig
    data_prefix: str
    data_blend: List[Corpus]
    """All corpora, `data_prefix` first, where there are several."""
    data_split: List[float] = field(metadata=about(NOT_NEGATIVE))
    data_cache: Optional[str]
    """The folder for index maps; null: beside the data, or in the user's cache."""
    data_masking: Optional[Masking] = field(metadata=about(written=False))
    """For bert and t5: which tokens are hidden."""
    data_documents: Optional[Documents] = field(metadata=about(written=False))
    """For conversations, and for text with data.packing: samples are documents."""
    data_augment: Optional[Augment] = field(metadata=about(written=False))
    """How training changes images, where it does."""
    data_bucketing: Optional[int] = field(metadata=about(COUNT, written=False))
    """For translation, where samples of alike length go together: how many global batches are sorted at a time."""
    timeline: bool
    nsys: bool
    trace_iteration: Optional[int] = field(metadata=about(COUNT, written=False))
    """The iteration of which the first rank of each stage writes torch's own trace."""
    device: str
    rehearsal: Optional[RehearsalConfig]


KEYS = (
    *("version", "run", "tensor", "data", "pipeline", "partition", "schedule", "micro_batch_size"),
    *("global_batch_size", "nodes", "ranks", "model", "train", "timeline", "device"),
)
"""What plans of all versions have."""
_NEEDED = {"nodes": ("name", "group", "gpu", "ranks"), "ranks": ("rank", "node", "stage", "dp", "tp")}
"""What each entry of a list has."""


def check_plan(content: Any, whole: bool) -> None:
    """Checks the content of a plan.json: all that a rank needs if `whole`, else what is there of it. Raises PlanFault:
    it breaks a rule."""
    if not isinstance(content, dict) or content.get("version") not in (EVEN, VERSION):
        found = content.get("version") if isinstance(content, dict) else content
        raise PlanFault(f"expected version {EVEN} or {VERSION}, found {found!r}")
    values = {key: value for key, value in content.items() if key not in ("version", "engine")}
    check_object(Content, values, "", whole)
    engine = content.get("engine", TDPP)
    if engine not in ENGINES:
        raise PlanFault(f"engine={engine!r} must be {' or '.join(ENGINES)}")
    if whole and engine == MEGATRON_LM and not values.get("script"):
        raise PlanFault(f"script={values.get('script')!r} must be the path of pretrain_gpt.py with engine={engine}")
    if not whole:
        for key, needed in _NEEDED.items():
            for number, entry in enumerate(values[key]):
                require(entry, needed, f"{key}[{number}]")
        require(values["train"], ("iterations", "log_interval"), "train")
        if values.get("rehearsal") is not None:
            require(values["rehearsal"], ("clock", "nodes"), "rehearsal")
    check_rules({**values, "engine": engine})
