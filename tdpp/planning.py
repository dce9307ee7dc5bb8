"""Configurations, and searching for plans."""

from __future__ import annotations

from collections.abc import Sequence

from conf import compose as composed
from conf.origins import origins_named
from conf.schema.experiment import Experiment
from fasop.errors import SearchError
from fasop.search.arguments import Arguments, parse
from fasop.search.inputs import read
from fasop.search.plan import Plan
from fasop.search.run import best_plans
from tdpp.overrides import checked

WORDS = ("top", "profile", "leave_out", "by_stage", "prove", "overrides")
"""The words of `tdpp search` that say what is searched; the others are about tables and files."""


def compose(overrides: Sequence[str] = ()) -> Experiment:
    """The checked configuration that `tdpp launch <overrides>` runs. Raises TdppError: a word cannot be read, or a rule
    is broken; with the message of the command line."""
    words = checked(overrides)
    with origins_named(words):
        return composed.compose(words)


def search(overrides: Sequence[str] = ()) -> list[Plan]:
    """The plans that `tdpp search <overrides>` shows, the fastest first: `plan.parallel`, `plan.total` (seconds of an
    iteration), `plan.nodes`, `plan.bound`.

    Raises:
        TdppError: what is asked for cannot be read or searched, or no plan fits.
    """
    arguments, usual = parse(checked(overrides)), Arguments()
    others = [name for name in vars(usual) if name not in WORDS and getattr(arguments, name) != getattr(usual, name)]
    if others:
        raise SearchError(f"{others[0]}=… is for 'tdpp search' on the command line; leave it out here")
    with origins_named(arguments.overrides):
        return list(best_plans(read(arguments.overrides, arguments.profile), arguments).plans)
