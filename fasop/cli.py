"""`tdpp search`: the best plans for a cluster and a model, as a table, a CSV file and a configuration."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import conf
from fasop.asked import Asked, parse
from fasop.errors import SearchError

USAGE = """usage: tdpp search [GROUP=CHOICE ...] [KEY=VALUE ...] [top=N] [csv=FILE] [plan=NAME] [overwrite=true]
                   [leave_out=true] [explain=ROW]

Ranks all ways to cut the model over the nodes of the cluster: tensor, data and pipeline size, micro-batch, schedule,
recomputation, sharded optimizer, node order and layers per stage. GROUP and KEY are those of 'tdpp launch'. Of
parallel the global batch counts, and what you give of it: parallel.recompute=full is then the only way that is tried,
parallel.recompute=none,full are the two; and so for tensor, data, pipeline, micro_batch_size, schedule, chunks,
sharded_optimizer, sequence_parallel.

  tdpp search experiment=seed_a100x1_a10x7
  tdpp search cluster=a10x8 model=xl parallel.global_batch_size=64 plan=best
  tdpp launch cluster=a10x8 model=xl parallel=best ...
  tdpp search experiment=seed_a10x8 parallel.schedule=one_f_one_b,gpipe parallel.tensor=1

  top=N            as many plans (10)
  csv=FILE         write them there as well
  plan=NAME        write the best one as conf/parallel/NAME.yaml, which parallel=NAME then takes
  overwrite=true   also when there is such a file
  leave_out=true   try plans that leave nodes out, too
  explain=ROW      tell of the plan in this row of the table where each second and each byte goes, stage by stage"""

if TYPE_CHECKING:
    from fasop.inputs import Inputs
    from fasop.search import Plan, Result

Show = Callable[[Sequence[str], Sequence[Sequence[str]]], None]
PLANS = Path(conf.__file__).resolve().parent / "parallel"


def main(argv: Sequence[str], *, show: Show) -> int:
    """Runs `tdpp search <argv>`; `show` puts a table on stdout.

    Raises:
        TdppError: what is asked for cannot be read, searched or written.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    asked = parse(argv)
    if asked.plan is not None:
        check_free(asked.plan, asked.overwrite)
    return rank(asked, f"tdpp search {shlex.join(argv)}", show)


def rank(asked: Asked, command: str, show: Show) -> int:
    """The best plans for the nodes of the cluster."""
    from fasop.costs import why_not_measured
    from fasop.inputs import read
    from fasop.table import COLUMNS, csv_text, plan_yaml, rows, warnings

    inputs = read(asked.overrides)
    result, told = best_plans(inputs, asked)
    if asked.explain is not None and asked.explain > len(result.plans):
        raise SearchError(f"explain={asked.explain}: there are {len(result.plans)} plans; choose a row of the table")
    show(COLUMNS, rows(result.plans))
    for warning in warnings(result.plans):
        print(f"({warning})", file=sys.stderr)
    for kind in inputs.kinds:
        if (why := why_not_measured(kind.gpu, kind.profile, inputs.training)) is not None:
            print(f"({why})", file=sys.stderr)
    print(
        f"{result.candidates} plans fit, {result.too_large} do not; {told}. What is not shown was found slower, "
        f"or is proved to be. Other layers per stage make the first at most {result.plans[0].gap:.0%} faster.",
        file=sys.stderr,
    )
    if asked.explain is not None:
        tell(asked.explain, result.plans[asked.explain - 1], show)
    if asked.csv is not None:
        _write(asked.csv, csv_text(result.plans, inputs.run))
    if asked.plan is not None:
        path = PLANS / f"{asked.plan}.yaml"
        _write(path, plan_yaml(result.plans[0], command))
        print(f"parallel={asked.plan} is the first of them ({path})")
    return 0


def best_plans(inputs: Inputs, asked: Asked) -> tuple[Result, str]:
    """The best plans, and in words which nodes and orders were tried."""
    from fasop.candidates import any_space, space
    from fasop.clusters import clusters, tried
    from fasop.orders import searched
    from fasop.progress import bar
    from fasop.search import Best, explore, found

    best = Best(max(asked.top, asked.explain or 0))
    counts = [kind.group.count for kind in inputs.kinds]
    with bar("searching") as told:
        if asked.leave_out:
            some = clusters(inputs.kinds)
            spaces = (any_space(inputs.training, kinds, inputs.choices) for kinds in some)
            seen = explore(spaces, best, len(some), told)
            where = f"{tried(inputs.kinds)}, at most in {searched(counts)}"
        else:
            seen = explore([space(inputs.training, inputs.kinds, inputs.choices)], best, told=told)
            where = searched(counts)
    if not best.plans:
        space(inputs.training, inputs.kinds, inputs.choices)  # which tells why
    return found(best.plans, seen), where


def tell(row: int, plan: Plan, show: Show) -> None:
    """Where the time and the memory of one plan go."""
    from fasop.explain import LEGEND, memory, times
    from fasop.predict import predict_plan

    kinds = list({node.name: node for node in plan.nodes}.values())
    prediction = predict_plan(plan.training, kinds)
    print(f"\nPlan {row}: an iteration of {prediction.iteration_s * 1e3:.1f} ms, by stage")
    show(*times(prediction))
    print(f"({LEGEND})", file=sys.stderr)
    print(f"\nPlan {row}: memory of a rank, by stage")
    show(*memory(prediction))


def check_free(name: str, overwrite: bool) -> None:
    """Before the search, so that no time is lost.

    Raises:
        SearchError: there is such a configuration.
    """
    path = PLANS / f"{name}.yaml"
    if path.exists() and not overwrite:
        raise SearchError(f"plan={name}: {path} exists; choose another name, or add overwrite=true")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SearchError(f"cannot write {path}: {error.strerror}; choose a folder where you may write") from error
