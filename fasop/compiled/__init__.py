"""The search's innermost loops, compiled when tdpp is installed, each under the name of its module.

All of them are None where one is missing, as without a C compiler: numpy then does the same, in more time.
"""

try:
    from fasop.compiled import bounds, climbs, layouts, partitions, ranks, replays, replicas
except ImportError:
    bounds = climbs = layouts = partitions = ranks = replays = replicas = None  # type: ignore[assignment]
