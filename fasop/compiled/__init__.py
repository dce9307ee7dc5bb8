"""The search's innermost loops, compiled when tdpp is installed, each under the name of its module.

All of them are None where one is missing, as without a C compiler: numpy then does the same, in more time. So it does
where one was built of other sources than those beside it, until tdpp is installed again.
"""

from fasop.compiled.build_age import require_current

try:
    require_current()
    from fasop.compiled import bounds, climbs, layouts, partitions, ranks, replays, replicas
except (ImportError, TypeError, ValueError):  # the last two are Cython's, of other arguments and of other sizes
    bounds = climbs = layouts = partitions = ranks = replays = replicas = None  # type: ignore[assignment]
