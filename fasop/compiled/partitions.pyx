# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Layers of each part: the loops of `fasop.partition` that find partitions."""

import numpy as np

from libc.math cimport INFINITY, floor
from libc.stdlib cimport qsort

from fasop.compiled.sorting cimport sort_column


def least_sum(
    const double[:, :, :] costs, const double[:, :, :] memory, const double[:, :] room, const double[:, :, :] most,
):
    """What `fasop.partition.least_sum.least_sum` does, with limits that allow for rounding: `room` [parts, pipelines],
    and `most` [limits, parts, pipelines]."""
    cdef Py_ssize_t cuts = costs.shape[0], parts = costs.shape[1], columns = costs.shape[2], limits = most.shape[0]
    cdef Py_ssize_t number, part, column, begin, end
    cdef long[:, :, ::1] found = np.zeros((limits, parts, columns), np.int64)
    cdef double[:, ::1] sums = np.empty((limits, columns)), takes = np.empty((cuts, cuts))
    cdef double[:, :, ::1] value = np.empty((limits, 2, cuts))
    cdef long[:, :, ::1] came = np.empty((limits, parts, cuts), np.int64)
    cdef double best, through
    for column in range(columns):
        for number in range(limits):
            for end in range(cuts):
                value[number, 0, end] = INFINITY if end else 0.0
        for part in range(parts):
            for end in range(cuts):
                for begin in range(end + 1):
                    takes[end, begin] = costs[end, part, column] - costs[begin, part, column]
                    if memory[end, part, column] - memory[begin, part, column] > room[part, column]:
                        takes[end, begin] = INFINITY
            for number in range(limits):
                for end in range(cuts):
                    best = INFINITY
                    came[number, part, end] = 0
                    for begin in range(end + 1):
                        through = value[number, part % 2, begin] + takes[end, begin]
                        if through < best and takes[end, begin] <= most[number, part, column]:
                            best = through
                            came[number, part, end] = begin
                    value[number, 1 - part % 2, end] = best
        for number in range(limits):
            sums[number, column] = value[number, parts % 2, cuts - 1]
            end = cuts - 1
            for part in range(parts - 1, -1, -1):
                begin = came[number, part, end]
                found[number, part, column] = end - begin
                end = begin
    return found.base, sums.base


def filled(
    const double[:, :, :, :] sums, const double[:, :, :] limits, const double[:, :] fixed, double rounding,
):
    """What `fasop.partition.heterogeneous_layers` does in `_filled` with sums [sums, layers + 1, parts, pipelines]: the
    layers of each part, how many there are in all, and what follows."""
    cdef Py_ssize_t kinds = sums.shape[0], cuts = sums.shape[1], parts = sums.shape[2], columns = sums.shape[3]
    cdef Py_ssize_t kind, part, column, cut, at, reach, others, before
    cdef long[:, ::1] found = np.zeros((parts, columns), np.int64)
    cdef long[::1] whole = np.zeros(columns, np.int64)
    cdef double[::1] following = np.full(columns, INFINITY)
    cdef double allowed, more
    for column in range(columns):
        at = 0
        for part in range(parts):
            reach = others = cuts
            for kind in range(kinds):
                allowed = sums[kind, at, part, column] + limits[kind, part, column]
                allowed = allowed + rounding * abs(allowed)
                before, others = -1, min(others, reach)
                for cut in range(cuts):
                    before += sums[kind, cut, part, column] <= allowed
                reach = min(reach, before)
            reach = max(reach, at)
            if kinds > 1 and reach < others:
                more = fixed[part, column] + sums[kinds - 1, min(reach + 1, cuts - 1), part, column]
                following[column] = min(following[column], more - sums[kinds - 1, at, part, column])
            found[part, column] = reach - at
            at = reach
        whole[column] = at
    return found.base, whole.base, following.base


def least_largest(
    const double[:, :] fixed, const double[:, :] layer, const long[:, :] capacity, Py_ssize_t layers
):
    """What `fasop.partition.local_search.least_largest` does, whose arrays these are."""
    cdef Py_ssize_t stages = fixed.shape[0], columns = fixed.shape[1], stage, column, best, left
    cdef long[:, ::1] found = np.zeros((stages, columns), np.int64)
    cdef double[::1] after = np.empty(stages)
    cdef double level, slower, below
    for column in range(columns):
        level, slower = 0.0, 0.0
        for stage in range(stages):
            level += fixed[stage, column] / layer[stage, column]
            slower += 1 / layer[stage, column]
        level, left = (layers + level) / slower, layers
        for stage in range(stages):
            below = floor((level - fixed[stage, column]) / layer[stage, column])
            found[stage, column] = <long>min(max(below, 0.0), <double>capacity[stage, column])
            left -= found[stage, column]
        for stage in range(stages):
            if left < 0:
                found[stage, column] = 0
            after[stage] = INFINITY
            if found[stage, column] < capacity[stage, column]:
                after[stage] = fixed[stage, column] + (found[stage, column] + 1) * layer[stage, column]
        left = layers if left < 0 else left
        while left > 0:
            best = 0
            for stage in range(1, stages):
                if after[stage] < after[best]:
                    best = stage
            found[best, column] += 1
            left -= 1
            after[best] = INFINITY
            if found[best, column] < capacity[best, column]:
                after[best] = fixed[best, column] + (found[best, column] + 1) * layer[best, column]
    return found.base


cdef int _by_size(const void *one, const void *other) noexcept nogil:
    return ((<double *>one)[0] > (<double *>other)[0]) - ((<double *>one)[0] < (<double *>other)[0])


def least_sums(
    const double[:, :] fixed, const double[:, :] layer, const long[::1] least, Py_ssize_t layers,
    Py_ssize_t micro_batches, const double[::1] lowest, double rounding,
):
    """[parts, pipelines]: what `fasop.partition.baselines._least_sum` finds of each, with at most 128 parts."""
    cdef Py_ssize_t parts = fixed.shape[0], columns = fixed.shape[1], column, part, other, number, amounts
    cdef long[:, ::1] found = np.zeros((parts, columns), np.int64)
    cdef Py_ssize_t[::1] order = np.empty(parts, np.intp)
    cdef double[::1] every = np.empty(parts * (layers + 1)), best = np.empty(parts), own = np.empty(parts)
    cdef double[::1] times = np.empty(parts), first = np.empty(parts)
    cdef double most, cost, lowest_cost, shortest
    for column in range(columns):
        sort_column(order, layer, column)
        for part in range(parts):
            first[part] = fixed[part, column]
        most = INFINITY
        if micro_batches > 1:
            shortest = _sum(&first[0], parts) + layers * layer[order[0], column]
            most = _filled_to(
                lowest[column], fixed, layer, least, layers, micro_batches, rounding, column, order, own, times, True
            )
            most = (most - shortest) / (micro_batches - 1)
        amounts = 0
        for number in range(layers + 1):
            for part in range(parts):
                cost = fixed[part, column] + number * layer[part, column]
                if cost >= lowest[column] * (1 - rounding) and cost <= most * (1 + rounding):
                    every[amounts] = cost
                    amounts += 1
        qsort(&every[0], amounts, sizeof(double), _by_size)
        other = 0
        for number in range(amounts):
            if not number or every[number] != every[number - 1]:
                every[other] = every[number]
                other += 1
        amounts, lowest_cost = other, INFINITY
        for number in range(amounts):
            cost = _filled_to(
                every[number], fixed, layer, least, layers, micro_batches, rounding, column, order, own, times,
                amounts == 1,
            )
            if not number or cost < lowest_cost:
                lowest_cost = cost
                best[:] = own
        for part in range(parts):
            found[part, column] = <long>best[part]
    return found.base


cdef double _filled_to(
    double largest, const double[:, :] fixed, const double[:, :] layer, const long[::1] least, Py_ssize_t layers,
    Py_ssize_t micro_batches, double rounding, Py_ssize_t column, const Py_ssize_t[::1] order, double[::1] own,
    double[::1] times, bint alone,
) noexcept:
    """What `baselines._filled` does with one amount: fills the partition, and returns its cost. Of several amounts
    numpy sums times one after another."""
    cdef Py_ssize_t parts = fixed.shape[0], number, part
    cdef double whole, room, before = 0.0, left = layers, held = 0.0, sums = 0.0, longest = -INFINITY
    cdef bint fits = True
    for part in range(parts):
        left -= least[part]
    for number in range(parts):
        part = order[number]
        whole = min(floor((largest - fixed[part, column]) / layer[part, column] + rounding), <double>layers)
        if fixed[part, column] + layers * layer[part, column] <= largest:
            whole = layers
        whole -= least[part]
        fits = fits and whole >= 0
        room = max(0.0, whole)
        own[part] = min(max(left - before, 0.0), room) + least[part]
        before += room
        held += own[part]
    for part in range(parts):
        times[part] = fixed[part, column] + own[part] * layer[part, column]
        sums += times[part]
        longest = max(longest, times[part])
    sums = _sum(&times[0], parts) if alone else sums
    return sums + (micro_batches - 1) * longest if fits and held >= layers else INFINITY


cdef double _sum(const double* values, Py_ssize_t count) noexcept nogil:
    """In the order of numpy's sum of so many numbers in a row, of at most 128."""
    cdef double total = 0.0
    cdef double[8] part
    cdef Py_ssize_t n, whole = 0
    if count >= 8:
        whole = count - count % 8
        for n in range(8):
            part[n] = values[n]
        for n in range(8, whole):
            part[n % 8] += values[n]
        total = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]))
    for n in range(whole, count):
        total += values[n]
    return total
