"""A plan in words, and which node has which ranks."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from datetime import UTC, datetime
from html import escape
from itertools import starmap
from typing import Any

from conf.schema.values.partition import Partition, dashed
from conf.visible import plural
from megatron_ext.contract.models.keys import DEFAULT
from megatron_ext.contract.parallel_config import Offload, Schedule
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.rules.engine import MEGATRON_LM
from reports.figures.page import Cell, Row, bullets, copyable, leaves, table
from reports.readers.hardware import ProfileFile
from reports.readers.record import UNKNOWN, Record

MOST_NODES = 16
"""The table of more nodes is folded."""


def plan_section(plan: Plan) -> str:
    """The section of a run's page on its plan, as HTML."""
    if not plan.ranks:
        return '<section><h2>Plan</h2><p class="none">the log does not give the layout of its ranks</p></section>'
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in _sentences(plan))
    return f"<section><h2>Plan</h2>{words}{_nodes(plan)}</section>"


def _sentences(plan: Plan) -> list[str]:
    known = {*Schedule}  # a log need not name one
    schedule = Schedule(plan.schedule).label if plan.schedule in known else plan.schedule
    order = f"the schedule in {plan.schedule_file}" if plan.schedule_file else f"schedule {schedule}"
    unusual = _unusual(plan)
    lengths = [str(tokens) for tokens in (plan.model.sequence_length, plan.model.decoder_tokens) if tokens]
    tokens = f" of {' + '.join(lengths)} tokens" if lengths else ""
    samples = f"{plan.global_batch_size} samples{tokens}{_shares(plan)}"
    return [
        f"{plural(len(plan.ranks), 'rank')} {_product(plan)}, {_where(plan)}.",
        *([_cut(plan)] if plan.partition and len(plan.partition) > 1 else []),
        f"Each iteration trains on {samples}, {order}.",
        *_model(plan),
        *([f"With {', '.join(unusual)}."] if unusual else []),
        *(["Megatron-LM trained it."] if plan.engine == MEGATRON_LM else []),
    ]


def _product(plan: Plan) -> str:
    if plan.island_plans is not None:
        islands = [
            f"{plural(own.pipeline, 'stage')} ({dashed(own.partition)} layers) × "
            f"{plural(own.layout.replicas[0], 'replica')} × {'-'.join(map(str, own.tensors or [own.tensor]))} "
            "tensor-parallel"
            for own in plan.by_island
        ]
        return f"in islands with plans of their own: {'; '.join(islands)}"
    if plan.tensors is None and plan.replicas is None:
        stages, replicas = plural(plan.pipeline, "pipeline stage"), plural(plan.taking, "data-parallel replica")
        context = f" × {plan.context} that share sequences" if plan.context else ""
        return f"= {stages} × {replicas}{context} × {plan.tensor} tensor-parallel"
    sizes = plan.sizes
    replicas = f"{sizes['data']} data-parallel replicas{' by stage' * (plan.replicas is not None)}"
    tensor = f"{sizes['tensor']} tensor-parallel{' by stage' * (plan.tensors is not None)}"
    return f"in {plan.pipeline} pipeline stages, {replicas} × {tensor}"


def _shares(plan: Plan) -> str:
    if plan.replicas is not None:
        count = plan.global_batch_size // plan.micro_batch_size
        return f": {count} micro-batches of {plan.micro_batch_size}, which the replicas of a stage take in turn"
    if plan.shares is not None:
        return f": {dashed(plan.shares)} micro-batches of {plan.micro_batch_size} on replicas 0 to {plan.data - 1}"
    of_each = plan.micro_batches[0] if plan.data else 0  # a log need not tell
    return f": {plural(of_each, 'micro-batch', 'es')} of {plan.micro_batch_size} per replica" if of_each else ""


def _model(plan: Plan) -> list[str]:
    model = plan.model
    vocabulary = [f"vocabulary {model.vocab_size}"] if model.vocab_size else []
    if model.padded_vocab_size:
        vocabulary = [f"{(vocabulary or ['vocabulary'])[0]} (padded to {model.padded_vocab_size})"]
    hidden = [f"hidden size {model.hidden}"] if model.hidden else []
    heads = [f"{model.heads} heads"] if model.heads else []
    layers = [plural(model.counted, "layer")] if model.layers and not plan.partition else []
    code = f" {os.path.basename(model.code)}" if model.code else ""  # noqa: PTH119  (a path with a name after it)
    family = [f"{model.family}{code}"] if model.family != DEFAULT else []
    known = [*family, *layers, *hidden, *heads, *vocabulary]
    return [f"Model: {', '.join(known)}."] if known else []


def _where(plan: Plan) -> str:
    nodes = plan.planned_nodes
    if all(node.name == UNKNOWN for node in nodes):
        return "on nodes that the log does not name"
    kinds = Counter((len(node.ranks), node.gpu) for node in nodes)
    if len(kinds) == 1:
        counted = f"{len(nodes[0].ranks)} {nodes[0].gpu}{' each' if len(nodes) > 1 else ''}"
    else:
        counted = ", ".join(f"{count} with {gpus} {gpu}" for (gpus, gpu), count in kinds.items())
    on = f"{plural(len(nodes), 'node')} ({counted})"
    return f"rehearsed on one machine, standing in for {on}" if plan.rehearsal else f"on {on}, device {plan.device}"


def _cut(plan: Plan) -> str:
    cut = f"The {_counted(plan)} are divided {Partition(tuple(plan.partition))}"
    if plan.chunks == 1:
        also = _beside(plan, "the first stage", "the last one")
        return f"{cut}; {also}." if also else f"{cut}."
    also = _beside(plan, "The first stage's first chunk", "the last stage's last one")
    chunks = (
        f"{cut}: every stage holds {plan.chunks} chunks of the model, listed as chunk 0 of all stages, then chunk 1, "
        f"and so on."
    )
    return f"{chunks} {also}." if also else chunks


def _beside(plan: Plan, first: str, last: str) -> str:
    """Which stages have what no partition counts; empty for a model that has nothing else."""
    model = plan.model
    if "embedding" not in dict(model.all_kinds()):
        return ""
    between = []
    for stack in model.stacks()[1:]:
        if kinds := " and ".join(f"the {kind.replace('_', ' ')}" for kind in model.before(stack.kind)):
            between.append(f"the stage of {stack.name}.{stack.first} {kinds}")
    head = "the head" if not model.traits.has_norms else "the final norm and the head"
    return ", ".join([f"{first} also has the embedding", *between, f"{last} {head}"])


def _counted(plan: Plan) -> str:
    """What the partition counts."""
    stacks = plan.model.stacks()
    if len(stacks) > 1:
        counts: dict[str, int] = {}
        for stack in stacks:
            counts[stack.name] = counts.get(stack.name, 0) + stack.layers
        return f"{' and '.join(f'{count} {name}' for name, count in counts.items())} layers"
    name = plan.model.counted_name()
    return f"{sum(plan.partition)} {'transformer layers' if name == 'layers' else name}"


def _unusual(plan: Plan) -> list[str]:
    """What is not as it is by default."""
    takes = Offload(plan.offload or Offload.none)
    parts = [f"stage {stage}: {dashed(own)}" for stage, own in enumerate(plan.shards or ()) if len({*own}) > 1]
    chosen = {
        f"{plan.recompute} recomputation of activations": plan.recompute != "none",
        "a sharded optimizer": plan.sharded_optimizer and plan.zero is None and plan.zeros is None,
        f"ZeRO stage {plan.zero}": plan.zero is not None and plan.zeros is None,
        f"ZeRO stages {dashed(plan.zeros or ())}, pipeline stage by stage": plan.zeros is not None,
        f"replicas that keep unlike parts ({'; '.join(parts)})": plan.shards is not None,
        f"the optimizer's state in the host's memory{_of_stages(plan, 'takes_optimizer')}": takes.takes_optimizer,
        f"activations in the host's memory{_of_stages(plan, 'takes_activations')}": takes.takes_activations,
        f"gradients summed in {plan.reduce_dtype}": plan.reduce_dtype not in (None, "fp32"),
        f"messages between stages in {plan.compress}": plan.compress not in (None, "none"),
        "messages scattered over tensor groups": bool(plan.scattered_cuts),
        "gradients summed within nodes first": bool(plan.hierarchical_stages),
        f"{len(plan.islands or ())} islands that meet every {plan.train.sync_every} iterations": bool(plan.islands),
        "sequence parallelism": plan.sequence_parallel,
        f"precision {plan.train.precision}": plan.train.precision not in ("fp32", UNKNOWN),
    }
    return [words for words, is_so in chosen.items() if is_so]


def _of_stages(plan: Plan, takes: str) -> str:
    """Name the stages whose ranks keep something in the host's memory, where those of others do not."""
    some = [stage for stage in range(plan.pipeline) if getattr(Offload(plan.offload_of(stage)), takes)]
    return "" if len(some) == plan.pipeline else f" (stages {', '.join(map(str, some))})"


def _nodes(plan: Plan) -> str:
    rows = []
    for node in plan.planned_nodes:
        if node.name == UNKNOWN:
            return ""
        numbers = ", ".join(map(str, node.ranks))
        stages = ", ".join(map(str, sorted({plan.ranks[rank].stage for rank in node.ranks})))
        rows.append((node.name, node.gpu, numbers, stages))
    drawn = table(("node it stands for" if plan.rehearsal else "node", "GPU", "ranks", "stages"), rows)
    if len(rows) <= MOST_NODES:
        return drawn
    return f"<details><summary>Ranks and stages of {len(rows)} nodes</summary>{drawn}</details>"


def reproduce_section(record: Record) -> str:
    """The section of a run's page, as HTML."""
    provenance = record.provenance
    rows = list(starmap(_row, leaves(provenance)))
    steps = []
    if provenance.get("commit"):
        steps.append(shlex.join(["git", "checkout", str(provenance["commit"])]))
        changed = [str(line) for line in provenance.get("changed") or ()]
        if any(line[:2] != "??" for line in changed):
            steps.append(shlex.join(["git", "apply", str(record.diff)]))
        steps += [
            f"# not in the patch, because git does not track it: {line[3:]}" for line in changed if line[:2] == "??"
        ]
    steps.append(shlex.join(["tdpp", "launch", *record.overrides]))
    known = table(("what", "value"), rows) if rows else '<p class="none">no provenance recorded</p>'
    return (
        f"<section><h2>Reproduce</h2>{copyable(chr(10).join(steps))}"
        f"<details><summary>Software and machines</summary>{known}</details></section>"
    )


def _row(key: str, value: Any) -> tuple[str, str]:
    if isinstance(value, list):
        return key, ", ".join(map(str, value))
    if key == "unix":
        return "time", datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds")
    return key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def configuration_section(record: Record) -> str:
    """The section of a run's page, as HTML."""
    overrides = bullets(record.overrides) if record.overrides else '<p class="none">no overrides, only defaults</p>'
    return (
        f"<section><h2>Configuration</h2><h3>Overrides as submitted</h3>{overrides}"
        f"<details><summary>config.yaml as submitted</summary><pre>{escape(record.config)}</pre></details></section>"
    )


def profiles_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty without such a file."""
    if not record.profiles:
        return ""
    drawn = table(("file", "of", "iteration", "opens in"), [_profile_row(one) for one in record.profiles])
    note = '<p class="note">The files are in the run&apos;s folder. A traced iteration takes longer than others.</p>'
    return f"<section><h2>Profiles</h2>{drawn}{note}</section>"


def _profile_row(one: ProfileFile) -> Row:
    at = one.iteration
    shown = "all" if at is None else f'<a href="timeline.html#iteration={at}">{at} in the timeline</a>'
    return Cell(f"<code>{escape(one.path)}</code>"), one.of, Cell(shown), one.opener
