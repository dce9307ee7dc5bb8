"""How often a run saves, and what failures of its nodes take, where these come at random: Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps" (2006)."""

from __future__ import annotations

import math

DAY_S = 86_400.0
USUAL_DAYS = 1000 / 6.5
"""Days between two failures of a node: 6.5 in a thousand node-days on Meta's RSC-1 ("Revisiting Reliability in
Large-Scale Machine Learning Research Clusters", 2024, arXiv:2410.21680)."""


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Returns the seconds of training between two saves after which the least time is lost, by saves and by failures
    every `mtbf_s` seconds on average.

    It is Young's optimum with Daly's next two terms.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def expected_s(work_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Returns the seconds that `work_s` of training and the save behind it take on average.

    Args:
        restart_s: from a failure until the work begins again, which may fail itself.
        mtbf_s: between two failures, which are as likely at any moment; infinite: there are none.
    """
    if math.isinf(mtbf_s):
        return work_s + save_s
    try:
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((work_s + save_s) / mtbf_s)
    except OverflowError:
        return math.inf
