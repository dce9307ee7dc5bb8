# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Bounds of many layouts by stage: the loops of `fasop.search.by_stage`."""

import numpy as np

from libc.math cimport INFINITY


cdef inline double _ends(double embedding, double head, long stage, long last) noexcept nogil:
    return (embedding if stage == 0 else 0.0) + (head if stage == last else 0.0)


def chains_of_rows(
    const long[::1] rows, const unsigned char[:, :, ::1] present, const long[:, ::1] size, const long[:, ::1] first,
    const long[:, ::1] replicas, const long[::1] last, const unsigned char[::1] even, const long[:, :] ahead,
    const long[:, :] lag, left, const double[:, :] forward, const double[:, :] backward,
    const double[:, :, :] embedding, const double[:, :, :] head, int count, double share, double far,
):
    """What `fasop.search.by_stage.bounds.layout_bounds` does in `PlacedLayouts._chain_of_trip`, layout by layout.

    Args:
        rows: the numbers of the layouts that are wanted.
        present: [kinds, layouts, stages]: whether stages lie on nodes of a kind.
        size, first: [layouts, stages]: the numbers of a stage's tensor size, and of the kind on which it begins.
        last: [layouts]: the number of the last stage.
        left: [layouts, stages]: forward passes that are left whichever replica it is, with GPipe; else None.
        forward, backward: [sizes, kinds]: seconds of a unit.
        embedding, head: [sizes, kinds, 2]: forward and backward.
        far: what a trip takes behind the last stage.

    Returns:
        [4, rows, stages]: the trip of a unit, the same beside units, the passes left of a unit, and beside units.
    """
    cdef Py_ssize_t number, row, s, kind, kinds = present.shape[0]
    cdef double[:, :, ::1] found = np.zeros((4, rows.shape[0], first.shape[1]))
    cdef double[6] least
    cdef const double[:, :] in_gpipe
    cdef int gpipe = left is not None, way
    cdef long batches, whole, own
    cdef double there, back, of_kind, passes, owed, there_end, end_forward, end_backward
    if gpipe:
        in_gpipe = left
    for number in range(rows.shape[0]):
        row = rows[number]
        for s in range(last[row] + 1):
            own = size[row, s]
            for way in range(6):
                least[way] = INFINITY
            for kind in range(kinds):
                if present[kind, row, s]:
                    end_forward = _ends(embedding[own, kind, 0], head[own, kind, 0], s, last[row])
                    end_backward = _ends(embedding[own, kind, 1], head[own, kind, 1], s, last[row])
                    least[0] = min(least[0], forward[own, kind] + share * backward[own, kind])
                    least[1] = min(least[1], forward[own, kind])
                    least[2] = min(least[2], backward[own, kind])
                    least[3] = min(least[3], end_forward + share * end_backward)
                    least[4] = min(least[4], end_forward)
                    least[5] = min(least[5], end_backward)
            if even[row]:
                found[0, number, s], found[1, number, s] = least[0], least[3]
            else:
                found[0, number, s], found[1, number, s] = least[1] + share * least[2], least[4] + share * least[5]
            found[2, number, s] = -INFINITY
            for kind in range(kinds):
                if not present[kind, row, s]:
                    continue
                batches = count // replicas[row, s]
                if first[row, s] == kind and batches * replicas[row, s] < count:
                    batches += 1
                if gpipe:
                    passes = in_gpipe[row, s]
                else:
                    whole = batches - ahead[row, s] - 1
                    passes = whole if whole > 0 else 0
                owed = min(lag[row, s], batches - 1) * (1 - share)
                back = batches - 1 - owed
                if back < 0.0:
                    back = 0.0
                end_forward = _ends(embedding[own, kind, 0], head[own, kind, 0], s, last[row])
                end_backward = _ends(embedding[own, kind, 1], head[own, kind, 1], s, last[row])
                there, there_end = forward[own, kind], end_forward
                if gpipe and not even[row]:  # the quickest replica's
                    there, there_end = least[1], least[4]
                of_kind = passes * there + back * backward[own, kind]
                if of_kind > found[2, number, s]:
                    found[2, number, s] = of_kind
                    found[3, number, s] = passes * there_end + back * end_backward
        for s in range(last[row] + 1, first.shape[1]):
            found[0, number, s], found[2, number, s] = far, 1.0
    return found.base


def shortest_trip(
    const unsigned char[:, ::1] allowed, double seconds, const double[:, ::1] step, const double[:, ::1] there,
    const double[:, ::1] back, const double[:, ::1] there_and_back, const double[:, ::1] summed,
    const double[:, ::1] returned, const double[:, ::1] pair, const double[:, ::1] turned,
    const double[:, ::1] crossed, const double[:, ::1] trips, const double[:, :, ::1] rounds,
):
    """What `fasop.search.by_stage.bounds.whole_layers.StageTables.shortest_trip` does, whose tables these are."""
    cdef Py_ssize_t stages = allowed.shape[0], whole = allowed.shape[1], stage, layers, own, before
    cdef double[:, :, ::1] ways = np.full((2, 4, whole), INFINITY)
    cdef double[:, ::1] later = np.full((stages + 1, whole), INFINITY), near = np.zeros((stages, whole))
    cdef double ahead, behind, both, free, trip, again
    later[stages, 0] = 0.0
    for stage in range(stages - 1, 0, -1):  # `later[stage]` is of the stage and those behind it
        for layers in range(whole):
            near[stage - 1, layers] = INFINITY
            for own in range(layers + 1):
                if allowed[stage, own]:
                    trip = later[stage + 1, layers - own] + there_and_back[stage, own]
                    later[stage, layers] = min(later[stage, layers], trip)
                    again = 2 * trip + trips[stage - 1, 2] * pair[stage, own]
                    near[stage - 1, layers] = min(near[stage - 1, layers], again)
    for own in range(4):
        ways[1, own, 0] = 0.0
    for stage in range(stages):
        for layers in range(whole):
            for own in range(4):
                ways[stage % 2, own, layers] = INFINITY
            trip, again = later[stage + 1, whole - 1 - layers], near[stage, whole - 1 - layers]
            for own in range(layers + 1):
                before = layers - own
                ahead = max(ways[1 - stage % 2, 0, before], step[stage, own])
                if not allowed[stage, own] or ahead == INFINITY:
                    continue
                behind = ways[1 - stage % 2, 1, before]
                both = max(ways[1 - stage % 2, 2, before], step[stage, own] + behind)
                free = ways[1 - stage % 2, 3, before] if stage else both
                if (
                    ahead + summed[stage, own] <= seconds
                    and both + returned[stage, own] <= seconds
                    and both + rounds[stage, 0, own] + 2 * trip <= seconds
                    and both + rounds[stage, 1, own] + (2 + trips[stage, 1]) * trip <= seconds
                    and both + rounds[stage, 2, own] + again <= seconds
                    and both + turned[stage, own] <= seconds
                    and free + crossed[stage, own] <= seconds
                ):
                    ways[stage % 2, 0, layers] = min(ways[stage % 2, 0, layers], ahead + there[stage, own])
                    ways[stage % 2, 1, layers] = min(ways[stage % 2, 1, layers], behind + back[stage, own])
                    ways[stage % 2, 2, layers] = min(ways[stage % 2, 2, layers], both + there_and_back[stage, own])
                    ways[stage % 2, 3, layers] = min(ways[stage % 2, 3, layers], free + there_and_back[stage, own])
    return ways[(stages - 1) % 2, 2, whole - 1]


def least_of(
    const long[:, :] partitions, const double[:, :] step, const double[:, :] alone, const double[:, :] there,
    const double[:, :] there_and_back, const double[:, :] summed, const double[:, :] returned, const double[:, :] left,
):
    """What `fasop.search.by_stage.bounds.whole_layers.StageTables.least_of` does, whose tables these are, but for
    rounding."""
    cdef Py_ssize_t stages = partitions.shape[0], count = partitions.shape[1], stage, one, own
    cdef double[::1] ahead = np.zeros(count), both = np.zeros(count), longest = np.full(count, -INFINITY)
    cdef double[::1] most = np.full(count, -INFINITY)
    for stage in range(stages):
        for one in range(count):
            own = partitions[stage, one]
            most[one] = max(most[one], alone[stage, own])
            longest[one] = max(longest[one], ahead[one] + summed[stage, own])
            longest[one] = max(longest[one], both[one] + returned[stage, own])
            ahead[one] += there[stage, own]
            both[one] += there_and_back[stage, own]
    for stage in range(stages):
        for one in range(count):
            longest[one] = max(longest[one], both[one] + left[stage, partitions[stage, one]])
    for one in range(count):
        most[one] = max(most[one], step[0, partitions[0, one]] + longest[one])
    return most.base
