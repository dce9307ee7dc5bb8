"""The typed shape of an experiment; the rules that join its keys are in `conf.schema.rules`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar, dataclass_transform

from omegaconf import MISSING

from conf.reading.user_files import is_file
from conf.schema import containers, environment, megatron_lm, ranges, rules
from conf.schema.partition import NodeOrder, Partition

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass that Hydra may still compose.

    OmegaConf makes every node of a frozen class read-only before the YAML files and overrides are merged
    into it, so nothing can be set (hydra issue 724). It looks at the flag, Python at the methods: clearing
    the flag lets Hydra compose, and the objects stay frozen.
    """
    frozen = dataclass(kw_only=True, frozen=True)(cls)
    frozen.__dataclass_params__.frozen = False  # type: ignore[attr-defined]
    return frozen


class Schedule(StrEnum):
    """In which order a stage takes its forward and backward passes (megatron_ext/contract/schedules.py)."""

    gpipe = "gpipe"
    """All forward, then all backward."""
    one_f_one_b = "one_f_one_b"
    """In turn; a stage holds no more micro-batches than stages follow it, and its own."""
    interleaved = "interleaved"
    """In turn over several chunks of the model on a stage: a smaller bubble for more messages and memory."""
    zb_h1 = "zb_h1"
    """1F1B with the weight gradients where it would wait: a smaller bubble, no stage holds more than the first."""


class Rehearse(StrEnum):
    """Whether time passes instead of computing, and by which clock (megatron_ext/engine/rehearsal.py)."""

    none = "none"
    virtual = "virtual"
    """Nobody waits: exact, and over in a moment."""
    anchored = "anchored"
    """Lasts as long as the real run would."""


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass, to save their memory."""

    none = "none"
    selective = "selective"
    """The attention's core."""
    full = "full"
    """All but each layer's input."""


class Precision(StrEnum):
    """Number format of the model's weights and activations; optimizer state and gradient sums are always fp32."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ContainerKind(StrEnum):
    none = "none"
    enroot = "enroot"
    pyxis = "pyxis"
    apptainer = "apptainer"


class ExecutorKind(StrEnum):
    local = "local"
    slurm = "slurm"


class EngineKind(StrEnum):
    """What trains on the ranks."""

    tdpp = "tdpp"
    megatron_lm = "megatron_lm"


class RunsMode(StrEnum):
    """Who may write into a run's folder: its owner, or the folder's group too, who are then trusted like the owner."""

    owner = "owner"
    group = "group"


class Het(StrEnum):
    """How a heterogeneous cluster is asked for: two coupled jobs, or one Slurm heterogeneous job."""

    jobs = "jobs"
    hetjob = "hetjob"


@config
class Gpu:
    """A kind of device. Rates are dense peaks from the maker's data sheet."""

    name: str = MISSING
    memory_gib: float = MISSING
    """Memory a process can use, GiB."""
    fp32_tflops: float = MISSING
    fp16_tflops: float = MISSING
    bf16_tflops: float = MISSING
    memory_gb_per_s: float = MISSING
    profile: str | None = None
    """What was measured on it, if there is one: the name of a profile of tdpp's, or the path of a .yaml file."""

    def __post_init__(self) -> None:
        if self.profile is not None and is_file(self.profile):  # a run may be looked at from another folder
            object.__setattr__(self, "profile", str(Path(self.profile).absolute()))


@config
class NodeGroup:
    """Nodes of one kind."""

    count: int = 1
    gpus_per_node: int | None = None
    """Ranks a node runs. null, for a cluster of one node: as many as the plan asks for."""
    gpu: str = MISSING
    """A key of `cluster.gpus`."""
    partition: str | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    """Memory of a node as Slurm writes it, such as 200G; 0 is all of it, null leaves the partition's default."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time_min: int | None = None
    """Slurm time limit, minutes; null leaves the partition's own."""
    intra_gbit_per_s: float = MISSING
    """Between two GPUs of a node."""
    intra_latency_us: float = MISSING
    inter_gbit_per_s: float = MISSING
    """Out of a node, shared by its ranks."""
    inter_latency_us: float = MISSING
    environment: dict[str, str] = field(default_factory=dict)
    """Given to the ranks of these nodes, over `cluster.environment`, for example NCCL_IB_HCA."""
    price_per_hour: float | None = None
    """Of one node, US dollars."""


@config
class Cluster:
    name: str = MISSING
    gpus: dict[str, Gpu] = field(default_factory=dict)
    groups: dict[str, NodeGroup] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Given to every rank, for example NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME."""
    environment_from: list[str] = field(default_factory=list)
    """Names of variables that every rank is given as the shell has them that launches: no file holds their values."""
    scratch: str = "/tmp"
    """A folder on each node's own disk."""

    def __post_init__(self) -> None:
        rules.gpus(self)
        rules.node_groups(self)
        environment.check(self)


@config
class Model:
    """A GPT-2 family model."""

    name: str = MISSING
    layers: int = MISSING
    hidden: int = MISSING
    heads: int = MISSING
    sequence_length: int = MISSING
    """Tokens a sample has, and positions the model knows."""
    vocab_size: int = MISSING
    """Tokens of the tokenizer, before padding."""
    vocab_multiple: int = 128
    """The embedding has vocab_size rounded up to a multiple of this times the tensor size, as in Megatron."""

    def __post_init__(self) -> None:
        ranges.check("model", self)
        rules.divides("model.heads", self.heads, "model.hidden", self.hidden)

    def padded_vocab(self, tensor: int) -> int:
        multiple = self.vocab_multiple * tensor
        return -(-self.vocab_size // multiple) * multiple

    def parameters(self) -> int:
        """Weights of the model without vocabulary padding; the tied embedding counts once."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        return (self.vocab_size + self.sequence_length) * self.hidden + self.layers * layer + 2 * self.hidden


@config
class Parallel:
    """The plan: how the model and the batch are cut, and which node takes which part."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    partition: str | None = None
    """Transformer layers per stage, such as 0-11-8-8-8-8-5-0; null: as even as possible.

    With several chunks first those of every stage's chunk 0, then of chunk 1, and so on.
    """
    sequence_parallel: bool = False
    """Share the sequence over the tensor group outside its parallel regions: less memory for the same messages."""
    recompute: Recompute = Recompute.none
    sharded_optimizer: bool = False
    """Each replica keeps the optimizer state of its share of the weights only (ZeRO stage 1)."""
    micro_batch_size: int = 1
    global_batch_size: int = MISSING
    schedule: Schedule = Schedule.one_f_one_b
    chunks: int = 1
    """Parts of the model that each stage holds, 2 or more with the schedule `interleaved`."""
    schedule_file: str | None = None
    """A schedule of your own, which runs instead of `schedule` (docs/formats.md)."""
    node_order: str | None = None
    """Node groups by node rank, such as hgx+gpu2*7; null: all nodes, in the cluster's order."""

    def __post_init__(self) -> None:
        ranges.check("parallel", self)
        rules.batch_divides(self)
        rules.chunks_fit(self)

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def virtual_stages(self) -> int:
        """Parts of the model: chunk c of stage s is number c * pipeline + s."""
        return self.pipeline * self.chunks

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each data-parallel replica runs in an iteration."""
        return self.global_batch_size // (self.data * self.micro_batch_size)


@config
class Container:
    """What the ranks run in; docs/containers.md tells what they find there."""

    kind: ContainerKind = ContainerKind.none
    image: str | None = None
    """A file (.sqsh for enroot and pyxis, .sif for apptainer), or nvcr.io/nvidia/pytorch:23.04-py3 of a registry."""
    image_dir: str = "${runs_dir}/../images"
    """A folder that all nodes share: where the file of a registry's image lies. It is made when it is missing."""
    digest: str | None = None
    """Of the image's file, sha256:…: a file with another one is not used."""
    mounts: list[str] = field(default_factory=list)
    """Of the host, beside what every run needs: SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro."""
    python: str = "python3"
    """The interpreter in the image."""
    reload: bool = False
    """Create the container anew although the node has one."""

    def __post_init__(self) -> None:
        containers.container(self)


@config
class Executor:
    kind: ExecutorKind = ExecutorKind.local
    het: Het = Het.jobs
    rehearse: Rehearse = Rehearse.none
    """Local only: go through the plan on this machine with the times that the GPUs' profiles give."""
    wait: bool = True
    """Local only: follow the run until it ends. false returns as soon as it was started."""
    master_port: int | None = None
    """null: a free port, which rank 0's node chooses and publishes."""
    time_min: int = 60 * 24
    """Local only: minutes after which the run is ended."""
    meet_min: float = 10
    """Minutes that nodes wait for the others before the run fails: those of another job may start later."""
    save_s: int = 120
    """This long before its time limit a run saves a checkpoint and ends; on Slurm it is then started again."""
    max_requeues: int = 3
    """Slurm only: how often a job is started again after its time limit, a preemption or the failure of a node."""

    def __post_init__(self) -> None:
        ranges.check("executor", self)


@config
class Train:
    iterations: int = MISSING
    seed: int = 1234
    lr: float = 1.5e-4
    min_lr: float = 1.0e-5
    lr_warmup_iterations: int = 0
    lr_decay_iterations: int | None = None
    """Length of warm-up and cosine together; null: all iterations."""
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1.0e-8
    clip_grad: float = 1.0
    """Largest norm of the gradient over all ranks; 0 does not clip."""
    precision: Precision = Precision.fp32
    compile: bool = False
    """Compile the transformer layers with torch.compile."""
    log_interval: int = 10
    load: str | None = None
    """A run folder, its checkpoints folder, or one of the folders in it: goes on from that checkpoint.

    A run that has a checkpoint of its own, because it was interrupted, goes on from its newest one instead.
    """
    checkpoint: bool = True
    """Save weights and optimizer state after the last iteration."""
    save_interval: int | None = None
    """Save them also each time after so many iterations; null: only at the end."""
    keep_checkpoints: int = 2
    """Older ones are deleted once a new one is on disk."""
    save_async: bool = False
    """Train on while a copy in the node's memory is written."""
    comm_timeout_s: int = 60
    """A rank that waits longer than this for a message of another one fails; on a GPU, one of whose passes takes longer
    with the wait for its message. Making the weights, indexing data, and reading and writing checkpoints may take up to
    two hours."""

    def __post_init__(self) -> None:
        ranges.check("train", self)
        rules.saving(self)
        rules.learning_rate(self)
        rules.optimizer(self)


@config
class Corpus:
    prefix: str = MISSING
    """As `data.prefix`."""
    weight: float = 1.0
    """As `data.weight`."""


@config
class Data:
    prefix: str = MISSING
    """Path of the indexed data without .bin and .idx, for example data/stdlib_text_document."""
    weight: float = 1.0
    """Share of these data in a blend, to that of the others."""
    blend: list[Corpus] = field(default_factory=list)
    """Further indexed data, whose samples are mixed in: `[{prefix: data/b_text_document, weight: 0.3}]`."""
    split: str = "969,30,1"
    """Weights of the training, validation and test documents."""
    cache: str | None = None
    """A folder, which all nodes share, for index maps; null: beside the data, or, where you may not write there, in
    your own cache ($XDG_CACHE_HOME/tdpp or ~/.cache/tdpp)."""

    def __post_init__(self) -> None:
        rules.split(self.split)
        rules.blend(self.corpora())

    def corpora(self) -> list[Corpus]:
        """All that is trained on, `prefix` first."""
        return [Corpus(prefix=self.prefix, weight=self.weight), *self.blend]


@config
class Engine:
    """What trains; all but `kind` is for Megatron-LM. Paths are as the ranks see them, for example in a container."""

    kind: EngineKind = EngineKind.tdpp
    checkout: str | None = None
    """Folder of Megatron-LM, with pretrain_gpt.py in it."""
    vocab_file: str | None = None
    """Of GPT-2's tokenizer, with merge_file. Indexed data need none: without, only the vocabulary's size is told."""
    merge_file: str | None = None
    arguments: list[str] = field(default_factory=list)
    """Further options of pretrain_gpt.py; they come last, and so win over those that tdpp gives."""

    def __post_init__(self) -> None:
        megatron_lm.engine(self)


@config
class Profile:
    timeline: bool = True
    """Record when each rank does what (events/rank-*.bin)."""
    nsys: bool = False
    """Run the ranks of every node under Nsight Systems, which must be on the node or in its container."""
    ncu: bool = False
    """The same under Nsight Compute, which measures every kernel but NCCL's, each run several times."""
    gpu_interval_s: int = 10
    """Seconds between two readings of the GPUs (nodes/<node>.gpu); 0: none are taken."""

    def __post_init__(self) -> None:
        ranges.check("profile", self)
        rules.one_profiler(self)


@config
class Experiment:
    """One run, whole. `OmegaConf.to_object` makes it; making it checks every rule."""

    name: str = "${model.name}"
    """Runs of a name share the folder `<runs_dir>/<name>`."""
    runs_dir: str = "runs"
    runs_mode: RunsMode = RunsMode.owner
    dry_run: bool = False
    """Print what would be started, and write nothing; what keeps it from being started is an error all the same."""
    skip_existing: bool = False
    """Start nothing for a configuration of which a run of this name has succeeded, or is in the queue or running."""
    max_jobs: int | None = None
    """Of the runs of a sweep, at most so many run at once; null: as many as the cluster takes."""
    confirm_gpu_hours: float = 1000.0
    """Ask before more than this is submitted to Slurm: the GPUs of the nodes times their time limits, over a sweep."""
    yes: bool = False
    """Submit without asking."""
    cluster: Cluster = MISSING
    model: Model = MISSING
    parallel: Parallel = MISSING
    container: Container = MISSING
    executor: Executor = MISSING
    train: Train = MISSING
    data: Data = MISSING
    engine: Engine = field(default_factory=Engine)
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self) -> None:
        ranges.check("", self)
        rules.run_name(self.name)
        rules.paths(self)
        rules.sweep(self)
        rules.partition_fits(self)
        rules.nodes_exist(self)
        rules.ranks_fill_nodes(self)
        rules.tensor_fits(self)
        rules.compiled_layers_put_nothing_off(self)
        containers.environment(self)
        megatron_lm.can_run(self)
        rules.a_rehearsal_is_on_this_machine(self)
        rules.time_is_left_to_train(self)

    @property
    def partition(self) -> Partition:
        """Layers per virtual stage, as asked for or even."""
        if self.parallel.partition is None:
            return Partition.even(self.model.layers, self.parallel.virtual_stages)
        return Partition.parse(self.parallel.partition)

    @property
    def node_order(self) -> NodeOrder:
        if self.parallel.node_order is None:
            return NodeOrder.of({name: group.count for name, group in self.cluster.groups.items()})
        return NodeOrder.parse(self.parallel.node_order)

    def ranks_per_node(self) -> tuple[int, ...]:
        """Ranks of each node, by node rank."""
        groups = [self.cluster.groups[name] for name in self.node_order.groups]
        return tuple(
            self.parallel.world_size if group.gpus_per_node is None else group.gpus_per_node for group in groups
        )
