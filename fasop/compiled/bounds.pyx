# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Bounds of iterations over all partitions: the loops of `fasop.partition.bounds` and `fasop.partition.possible_stages`."""

import numpy as np

from libc.math cimport INFINITY, floor

from fasop.compiled.sorting cimport sort_column


def mean_of(
    const double[:, :] trip, const double[:, :] fixed, const double[:, :] layer, const double[:] layers, double tiny
):
    """What `fasop.partition.bounds.mean_of` does, whose arrays [stages, pipelines] these are, of so many `layers` of
    each pipeline."""
    cdef Py_ssize_t column, s, stages = trip.shape[0], columns = trip.shape[1]
    cdef double[::1] found = np.empty(columns), weights = np.empty(stages)
    cdef Py_ssize_t[::1] order = np.empty(stages, np.intp)
    cdef double shares, paid, level, price, total, lowest
    for column in range(columns):
        sort_column(order, trip, column)
        shares, paid, level = 0.0, 0.0, INFINITY
        for s in range(stages):
            price = 1 / max(layer[order[s], column], tiny)
            shares += price
            paid += price * trip[order[s], column]
            level = min(level, (1 + paid) / shares)
        total = 0.0
        for s in range(stages):
            weights[s] = max(0.0, level - trip[s, column]) / max(layer[s, column], tiny)
            total += weights[s]
        total, paid, lowest = max(total, tiny), 0.0, INFINITY
        for s in range(stages):
            weights[s] /= total
            lowest = min(lowest, trip[s, column] + weights[s] * layer[s, column])
            paid += weights[s] * fixed[s, column]
        found[column] = layers[column] * lowest + paid
    return found.base


def mean_over_stages(
    const double[:, :] own, const double[:, :] own_layer, const double[:, :] way, const double[:, :] way_layer,
    const double[:] layers,
):
    """What `fasop.partition.bounds._mean_bound` does, whose arrays [stages, pipelines] these are: what is fixed of a
    stage's own passes, of the way through it, with both messages, and what a layer adds to both."""
    cdef Py_ssize_t column, s, stages = own.shape[0], columns = own.shape[1]
    cdef double[::1] found = np.empty(columns), weights = np.empty(stages), beyond = np.empty(stages)
    cdef double later, behind, constant, lowest
    for column in range(columns):
        later, behind = 0.0, 0.0
        for s in range(stages - 1, -1, -1):
            weights[s] = max(0.0, 1 - later * way_layer[s, column]) / own_layer[s, column]
            later += weights[s]
        for s in range(stages - 1, -1, -1):
            weights[s] /= later
            behind += weights[s]
            beyond[s] = behind - weights[s]
        constant, lowest = 0.0, INFINITY
        for s in range(stages):
            constant += weights[s] * own[s, column] + beyond[s] * way[s, column]
            lowest = min(lowest, weights[s] * own_layer[s, column] + beyond[s] * way_layer[s, column])
        found[column] = constant + layers[column] * lowest
    return found.base


def least_slopes(const double[:, :] fixed, const double[:, :] layer, hidden, const long[:] again, Py_ssize_t layers):
    """[stages, pipelines]: what `fasop.simulation.linear.Hidden.left` of sums of gradients is without layers, and what
    each layer adds to it at least, of up to so many: the lowest of its slopes from there.

    Args:
        fixed: of the sums, [stages, pipelines], and what a layer adds to it.
        hidden: `Hidden.rows`.
        again: [pipelines]: how many layers are computed again.
    """
    cdef Py_ssize_t column, s, n, stages = fixed.shape[0], columns = fixed.shape[1]
    cdef const double[:, :] time = hidden[0], time_layer = hidden[1], longer = hidden[2], last = hidden[3]
    cdef const double[:, :] behind = hidden[4], behind_layer = hidden[5], turns = hidden[6]
    cdef double[:, ::1] begin = np.empty((stages, columns)), slopes = np.empty((stages, columns))
    cdef double whole, left, least
    for s in range(stages):
        for column in range(columns):
            least = INFINITY
            for n in range(layers + 1):
                whole = fixed[s, column] + n * layer[s, column]
                left = time[s, column] + n * time_layer[s, column] + min(n, again[column]) * longer[s, column]
                left = min(whole, max(whole - left, last[s, column]))
                whole = max(0.0, behind[s, column] + n * behind_layer[s, column])
                left += whole + min(n, 1) * turns[s, column]
                if n == 0:
                    begin[s, column] = left
                else:
                    least = min(least, (left - begin[s, column]) / n)
            slopes[s, column] = least
    return begin.base, slopes.base


def whole_of(
    const double[:, :] trip, const double[:, :] fixed, const double[:, :] layer, const long[:, :] capacity,
    const double[:] least, Py_ssize_t layers, Py_ssize_t levels, double rounding,
):
    """What `fasop.partition.bounds.whole_of` does, whose arrays these are, from the `least` amounts [pipelines] on."""
    cdef Py_ssize_t stages = trip.shape[0], columns = trip.shape[1], stage, column, other, level
    cdef double[::1] found = np.full(columns, INFINITY)
    cdef Py_ssize_t[::1] order = np.empty(stages, np.intp)
    cdef double amount, room, most, held, taken, following, cheapest
    for column in range(columns):
        sort_column(order, trip, column)
        amount, cheapest = least[column], layers * trip[order[0], column]
        for level in range(levels):
            held, taken, following = 0.0, 0.0, INFINITY
            for other in range(stages):
                stage = order[other]
                most = min(<double>capacity[stage, column], <double>layers)
                room = min(floor((amount - fixed[stage, column]) / layer[stage, column] + rounding), most)
                room = max(room, 0.0)
                if room < most:
                    following = min(following, fixed[stage, column] + (room + 1) * layer[stage, column])
                room = min(room, layers - held)
                held += room
                taken += room * trip[stage, column]
            found[column] = min(found[column], amount + taken)
            amount = max(amount, following)
            if not following + cheapest < found[column]:
                break
        else:
            found[column] = min(found[column], amount + cheapest)
    return found.base


def possible_steps(
    const unsigned char[:, :, ::1] steps, double seconds, const double[:, ::1] begin, const double[:, :, ::1] update,
    const double[:, :, ::1] there, const double[:, :, ::1] trip, const double[:, :, ::1] last,
    const double[:, :, ::1] turned, const double[:, :, ::1] summed,
):
    """What `fasop.partition.possible_stages.StepChains.within` does, whose arrays these are: 1 where a step is left."""
    cdef Py_ssize_t stages = steps.shape[0], cuts = steps.shape[1], stage, first, end
    cdef unsigned char[:, :, ::1] found = np.zeros((stages, cuts, cuts), np.uint8)
    cdef double[:, ::1] onward = np.full((stages + 1, cuts), INFINITY)
    cdef double[:, ::1] reached = np.full((stages + 1, cuts), INFINITY)
    cdef double[:, ::1] arrived = np.full((stages + 1, cuts), INFINITY)
    cdef double before, way, begun
    onward[stages, cuts - 1] = 0.0
    for stage in range(stages - 1, 0, -1):
        for first in range(cuts):
            for end in range(first, cuts):
                if steps[stage, first, end]:
                    onward[stage, first] = min(onward[stage, first], trip[stage, first, end] + onward[stage + 1, end])
    for first in range(cuts):
        reached[0, first] = arrived[0, first] = 0.0
    for stage in range(stages):
        for first in range(cuts):
            for end in range(first, cuts):
                if not steps[stage, first, end]:
                    continue
                before = reached[stage, first] if stage else begin[first, end]
                way = before + trip[stage, first, end]
                begun = max(arrived[stage, first], update[stage, first, end])
                if (
                    way + onward[stage + 1, end] + turned[stage, first, end] < seconds
                    and before + last[stage, first, end] < seconds
                    and begun + summed[stage, first, end] < seconds
                ):
                    found[stage, first, end] = 1
                    reached[stage + 1, end] = min(reached[stage + 1, end], way)
                    arrived[stage + 1, end] = min(arrived[stage + 1, end], begun + there[stage, first, end])
    return found.base
