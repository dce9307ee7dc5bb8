"""What a run is to reach: `train.until=loss<=2.5` ends it there, `train.best=loss` keeps the best checkpoint."""

from __future__ import annotations

import math
import re
from typing import Mapping, NamedTuple, Optional

SPLIT = "valid"
"""That is evaluated while a run trains."""
UNTIL, MAX_COST, SAMPLES = "until", "max_cost", "samples"
"""Keys of `train` by which a run may end before its last iteration; `samples` where its batch adapts."""
LARGER = {
    **dict.fromkeys(("loss", "perplexity", "nll"), False),
    **dict.fromkeys(("accuracy", "top-1", "top-5", "bleu"), True),
}
"""For each metric by its name, whether more is better."""
BLEU = "bleu"
"""The metric of models that translate, by greedy translation of text: measured where a goal names it."""
OF_TRANSLATION = ("loss", "nll", "accuracy", "perplexity", BLEU)
"""What an evaluation of a model that translates gives."""
_TARGET = re.compile(r"\s*([A-Za-z_][\w-]*)\s*(<=|>=)\s*(\S+)\s*")
_BEST = re.compile(r"(?:(min|max):)?([A-Za-z_][\w-]*)")


class Target(NamedTuple):
    """A metric, and the value that it is to reach."""

    metric: str
    larger: bool
    """Whether it is reached from below."""
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse `METRIC<=VALUE` or `METRIC>=VALUE`. Raises ValueError: what the text must be."""
        found = _TARGET.fullmatch(text)
        try:
            value = float(found[3]) if found else math.nan
        except ValueError:
            value = math.nan
        if found is None or not math.isfinite(value):
            raise ValueError("a metric, <= or >=, and a number, such as 'loss<=2.5'")
        return cls(found[1], found[2] == ">=", value)

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Tell whether an evaluation's metrics reach it; what is not a number reaches nothing."""
        found = metrics.get(self.metric, math.nan)
        return found >= self.value if self.larger else found <= self.value


class Best(NamedTuple):
    """A metric, and which of two values is the better one."""

    metric: str
    larger: bool

    @classmethod
    def parse(cls, text: str) -> Best:
        """Parse `METRIC` whose direction is known, or `min:METRIC` or `max:METRIC`. Raises ValueError: what the text
        must be."""
        found = _BEST.fullmatch(text)
        if found is None or (found[1] is None and found[2] not in LARGER):
            raise ValueError(f"one of {', '.join(LARGER)}, or another metric as min:METRIC or max:METRIC")
        return cls(found[2], LARGER[found[2]] if found[1] is None else found[1] == "max")

    def better(self, found: float, before: float) -> bool:
        """Whether `found` is a number, and better than what was found before, if that was one."""
        if math.isnan(found) or math.isnan(before):
            return not math.isnan(found)
        return found > before if self.larger else found < before


def names_metric(metric: str, until: Optional[str], best: Optional[str]) -> bool:
    """Whether `train.until` or `train.best` is by this metric."""
    wanted = [None if until is None else Target.parse(until).metric, None if best is None else Best.parse(best).metric]
    return metric in wanted
