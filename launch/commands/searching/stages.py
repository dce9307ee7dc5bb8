"""`tdpp search … parallel.schedule=pipedream`: the best stages of a model that run without a flush."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conf.pipedream.driver import ModelType
from conf.reading.files import check_writable, write_whole
from conf.reading.values import Reader, flag, name_of, parse_key_values, path
from fasop.errors import SearchError
from launch.commands.searching.graph import check_folder, export, on_cluster, replicas_of, write_results
from launch.commands.searching.plans import check_plan_free, plan_path, with_plan
from launch.judge.state import print_next
from launch.screen import print_table, remark
from megatron_ext.contract.models.model import IMAGES, PAIRS

ASKED = "parallel.schedule=pipedream"
WORDS: Mapping[str, Reader[Any]] = {
    "profile": name_of("profile"),
    "plan": name_of("configuration"),
    "overwrite": flag,
    "straight": flag,
    "fewer": flag,
    "csv": path,
    "page": path,
    "graph_output": path,
    "export": path,
}
ONLY: Mapping[str, object] = {"tensor": 1, "chunks": 1, "sharded_optimizer": False, "sequence_parallel": False}
"""The one value of what else a search tries, by key of `parallel`."""


def _require_one_way(given: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises SearchError for values of a plan that a stage without a flush does not take."""
    for key, values in given.items():
        word = f"parallel.{key}={','.join(str(value).lower() for value in values)}"
        if key in ("data", "pipeline"):
            raise SearchError(f"{word}: the search itself finds the stages and their replicas; leave it out")
        if key in ONLY and values != (ONLY[key],):
            raise SearchError(
                f"{word}: a search for stages without a flush needs {key}={str(ONLY[key]).lower()}; leave it out"
            )
        if len(values) > 1:
            raise SearchError(
                f"{word}: a pipeline without a flush updates the weights after each micro-batch, so its size changes "
                f"the training; give one size"
                if key == "micro_batch_size"
                else f"{word}: give one value"
            )


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp search <argv>`."""
    from fasop.graphs.division import Options, summary, table
    from fasop.graphs.of_model import graph_of, held_of, partition_of, plan_text, require_streaming
    from fasop.graphs.own.on_nodes import on_nodes
    from fasop.search.inputs import read
    from fasop.search.space.choices import split

    own, overrides = parse_key_values([word for word in argv if word != ASKED], WORDS, SearchError)
    check_writable(own.get("csv"), own.get("page"), own.get("graph_output"))
    if "export" in own:
        check_folder(own["export"])
    plan, command = own.get("plan"), f"tdpp search {shlex.join(argv)}"
    if plan is not None:
        check_plan_free(plan, own.get("overwrite", False))
    given, _ = split(overrides)
    _require_one_way(given)
    inputs = read(overrides, own.get("profile"))
    (size,) = given.get("micro_batch_size", (1,))
    training = replace(inputs.training, parallel=replace(inputs.training.parallel, micro_batch_size=size))
    require_streaming(training)
    graphs = [graph_of(training, kind, together=True) for kind in inputs.kinds]
    options = Options(straight=own.get("straight", False), fewer=own.get("fewer", False))
    division = on_nodes(graphs, range(len(graphs)), inputs.kinds, options, held_of(training), in_order=True)
    print_table(*table(division))
    print(f"parallel.partition={partition_of(division)} parallel.replicas={division.replicas}: {summary(division)}")
    remark(inputs.by_default)
    remark(*division.notes)
    write_results(division, command, own.get("csv"), own.get("page"), own.get("graph_output"))
    if "export" in own:
        model, partition = training.model, partition_of(division).layers
        machines = on_cluster(inputs.cluster, division.node_order, sum(replicas_of(division)))
        kind = {IMAGES: ModelType.images, PAIRS: ModelType.translation}.get(model.traits.learns)
        size = training.parallel.micro_batch_size
        export(own["export"], model.name, division, machines, kind, size, model.sized(1), partition)
    if plan is not None:
        file = plan_path(plan)
        write_whole(file, plan_text(division, training, command))
        print(f"parallel={plan} is this plan ({file})")
    print_next(with_plan(plan, overrides, command))
    return 0
