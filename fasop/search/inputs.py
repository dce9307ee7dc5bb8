"""What is to be searched, from the configurations that `tdpp launch` reads.

A search chooses the plan. Of `parallel` only the global batch counts, and what the command line itself gives; so a
configuration whose plan does not fit its cluster can be searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from conf.compose import compose_unchecked, to_object
from conf.defaults_taken import SEARCHED, defaults_taken
from conf.errors import ConfigError
from conf.schema.experiment import Cluster, Engine, Model, Parallel, Train
from conf.schema.model import Family
from fasop.costs.hardware import NodeKind, node_kinds
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.search.arguments import WORDS
from fasop.search.choices import Choices, runnable, split, tried
from fasop.search.plan import Run

PLAIN = (
    *("parallel.tensor=1", "parallel.data=1", "parallel.pipeline=1", "parallel.partition=null"),
    *("parallel.micro_batch_size=1", "parallel.schedule=one_f_one_b", "parallel.chunks=1", "parallel.node_order=null"),
    "parallel.shares=null",
)
"""In the place of a configured plan, so that nothing of it can contradict the batch."""


LENGTH = "train.iterations"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    cluster: Cluster
    kinds: Sequence[NodeKind]
    training: Training
    """Without sizes; its options are the first of `choices`."""
    choices: Choices
    run: Run
    """The training, whole."""
    by_default: str | None = None
    """In words, what of it nobody chose."""


def read(overrides: Sequence[str]) -> Inputs:
    """From the overrides of a command line.

    Raises:
        SearchError: Hydra cannot compose them, or a plan cannot be searched with them.
        ConfigError: a value is missing, or a rule of a part is broken.
    """
    given, others = split(overrides)
    try:
        cfg = compose_unchecked([*others, *PLAIN])
    except ConfigError as error:
        raise SearchError("\n".join([str(error), *_meant(others)])) from error
    if cfg.model.family == Family.module:
        raise SearchError(
            f"model.code={cfg.model.code}: a search needs what each block costs, and nothing measures a module "
            "of your own; launch it with sizes and a parallel.partition of your choice"
        )
    parallel = to_object(cfg, Parallel, "parallel")
    if parallel.schedule_file is not None:
        raise SearchError(
            f"parallel.schedule_file={parallel.schedule_file} cannot be searched: it is of one pipeline size; use "
            "parallel.schedule_file=null"
        )
    cluster, train, engine = (
        to_object(cfg, Cluster, "cluster"),
        to_object(cfg, Train, "train"),
        to_object(cfg, Engine, "engine"),
    )
    allowed = runnable(engine, train)
    choices = tried(allowed, given, engine, parallel.sequence_parallel)
    plain = replace(
        parallel,
        recompute=choices.recompute[0],
        sharded_optimizer=choices.sharded_optimizer[0],
        sequence_parallel=choices.sequence_parallel[0],
    )
    training = Training(model=to_object(cfg, Model, "model"), parallel=plain, precision=train.precision, engine=engine)
    return Inputs(
        cluster=cluster,
        kinds=node_kinds(cluster),
        training=training,
        choices=choices,
        by_default=defaults_taken(overrides, cfg, SEARCHED),
        run=Run(iterations=train.iterations, known=LENGTH in (word.partition("=")[0].lstrip("+") for word in others)),
    )


def _meant(words: Sequence[str]) -> Iterator[str]:
    """The search's own words that come near to words which may be misspelt."""
    for word in words:
        key = word.partition("=")[0].lstrip("+-")
        if near := get_close_matches(key, WORDS, n=1, cutoff=0.75):
            yield f"did you mean {near[0]}=? 'tdpp search --help' lists the search's own words"
