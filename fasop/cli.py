"""`tdpp search`: the best plans for a cluster and a model, as a table, a CSV file and a configuration."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import conf
from fasop.errors import SearchError

USAGE = """usage: tdpp search [GROUP=CHOICE ...] [KEY=VALUE ...] [top=N] [csv=FILE] [plan=NAME] [overwrite=true]

Ranks all ways to cut the model over all nodes of the cluster: tensor, data and pipeline size, micro-batch, node order
and layers per stage. GROUP and KEY are those of 'tdpp launch'; it searches for cluster, model, engine, train.precision
and the parts of parallel that are no sizes, such as parallel.global_batch_size and parallel.recompute.

  tdpp search experiment=seed_a100x1_a10x7
  tdpp search cluster=a10x8 model=xl parallel.global_batch_size=64 plan=best
  tdpp launch cluster=a10x8 model=xl parallel=best ...

  top=N            as many plans (10)
  csv=FILE         write them there as well
  plan=NAME        write the best one as conf/parallel/NAME.yaml, which parallel=NAME then takes
  overwrite=true   also when there is such a file"""

Show = Callable[[Sequence[str], Sequence[Sequence[str]]], None]
PLANS = Path(conf.__file__).resolve().parent / "parallel"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The words of the command line that are not Hydra's."""

    top: int = 10
    csv: Path | None = None
    plan: str | None = None
    overwrite: bool = False
    overrides: tuple[str, ...] = ()


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
        check_plan_name(asked.plan, asked.overwrite)
    from fasop.candidates import space
    from fasop.inputs import read
    from fasop.orders import searched
    from fasop.search import search
    from fasop.table import COLUMNS, csv_text, plan_yaml, rows, warnings

    inputs = read(asked.overrides)
    candidates = space(inputs.training, inputs.kinds)
    result = search(candidates, asked.top)
    show(COLUMNS, rows(result.plans))
    for warning in warnings(result.plans):
        print(f"({warning})", file=sys.stderr)
    orders = searched([kind.group.count for kind in inputs.kinds])
    print(
        f"{result.candidates} plans fit, {candidates.too_large} do not; {orders}. What is not shown was found slower, "
        f"or is proved to be. Other layers per stage make the first at most {result.plans[0].gap:.0%} faster.",
        file=sys.stderr,
    )
    if asked.csv is not None:
        _write(asked.csv, csv_text(result.plans))
    if asked.plan is not None:
        path = PLANS / f"{asked.plan}.yaml"
        _write(path, plan_yaml(result.plans[0], f"tdpp search {shlex.join(argv)}"))
        print(f"parallel={asked.plan} is the first of them ({path})")
    return 0


def parse(argv: Sequence[str]) -> Asked:
    """Takes the search's own words out of the others.

    Raises:
        SearchError: a word has no such value.
    """
    own = {}
    overrides = []
    for word in argv:
        key, _, value = word.partition("=")
        if key in ("top", "csv", "plan", "overwrite"):
            own[key] = value
        else:
            overrides.append(word)
    top, overwrite = own.get("top", "10"), own.get("overwrite", "false")
    if not (top.isascii() and top.isdecimal() and int(top)):
        raise SearchError(f"top={top} must be a number of plans, 1 or more")
    if overwrite not in ("true", "false"):
        raise SearchError(f"overwrite={overwrite} must be true or false")
    return Asked(
        top=int(top),
        csv=Path(own["csv"]) if "csv" in own else None,
        plan=own.get("plan"),
        overwrite=overwrite == "true",
        overrides=tuple(overrides),
    )


def check_plan_name(name: str, overwrite: bool) -> None:
    """Before the search, so that no time is lost.

    Raises:
        SearchError: it cannot name a file, or one is there.
    """
    if not name or not all(c.isascii() and (c.isalnum() or c in "_-") for c in name):
        raise SearchError(f"plan={name!r} cannot name a configuration: use letters, digits, '_' and '-'")
    path = PLANS / f"{name}.yaml"
    if path.exists() and not overwrite:
        raise SearchError(f"plan={name}: {path} exists; choose another name, or add overwrite=true")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SearchError(f"cannot write {path}: {error.strerror}; choose a folder where you may write") from error
