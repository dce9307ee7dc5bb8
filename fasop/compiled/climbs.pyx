# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Layers that move to where an iteration gets shorter: the loops of `fasop.partition.local_search`."""

import numpy as np

from fasop.compiled.replicas cimport Replica


cdef class Climb:
    """What `fasop.partition.local_search.improved` does with each of some pipelines, one move of a layer at a time.

    Args:
        replicas: of all pipelines.
        first, members: [pipelines + 1] and [members, 2]: which of the `replicas` each pipeline has, and which of their
            pipelines these are.
        capacity: [stages, pipelines]
        shares: [moments, parts, pipelines], or no moments.
        full: the part of a memory that may be taken.
    """

    cdef list replicas
    cdef const long[::1] first
    cdef const long[:, ::1] members
    cdef const long[:, :] capacity
    cdef const double[:, :, :] shares
    cdef double full
    cdef Py_ssize_t[:, ::1] pairs, tried, left
    cdef double[::1] gains, seconds, found
    cdef unsigned char[::1] in_time, has_room
    cdef int[::1] stage

    def __init__(self, list replicas, first, members, capacity, shares, double full):
        cdef Replica one = replicas[0]
        cdef Py_ssize_t pairs = one.parts * one.parts
        self.replicas, self.first, self.members, self.capacity = replicas, first, members, capacity
        self.shares, self.full = shares, full
        self.pairs, self.tried = np.empty((2, pairs), np.intp), np.empty((2, pairs), np.intp)
        self.left, self.in_time = np.empty((3, pairs), np.intp), np.empty(pairs, np.uint8)
        self.gains, self.seconds, self.found = np.empty(pairs), np.empty(pairs), np.empty(pairs)
        self.has_room = np.empty(one.stages, np.uint8)
        self.stage = np.arange(one.parts, dtype=np.intc) % one.stages

    def move(self, long[:, ::1] partitions, double[::1] seconds, const long[::1] columns):
        """Moves a layer of each of the partitions [parts, pipelines] in these columns, where that makes the `seconds`
        fewer, in place. Returns where it did."""
        cdef Py_ssize_t number
        cdef unsigned char[::1] gained = np.zeros(len(columns), np.uint8)
        cdef long[::1] layers = np.empty(partitions.shape[0], np.int64)
        for number in range(columns.shape[0]):
            gained[number] = self._move(partitions, seconds, columns[number], layers)
        return gained.base.astype(bool)

    cdef bint _move(self, long[:, ::1] partitions, double[::1] seconds, Py_ssize_t column, long[::1] layers):
        cdef Py_ssize_t begin = self.first[column], end = self.first[column + 1], member, slowest = begin, place, number
        cdef Py_ssize_t source, target
        cdef Py_ssize_t parts = partitions.shape[0], most = parts * (parts - 1), low = 0, high = 2 * parts, some, best
        cdef Replica one, last
        cdef const Py_ssize_t[::1] order
        cdef double known = seconds[column]
        for place in range(parts):
            layers[place] = partitions[place, column]
        for member in range(begin, end):
            one = self.replicas[self.members[member, 0]]
            one.begin(self.members[member, 1], &layers[0], -1.0 if self.members[member, 0] else known)
            last = self.replicas[self.members[slowest, 0]]
            if one.total > last.total:
                slowest = member
        order = np.argsort(self._rank(begin, end, slowest, column, layers, known), kind="stable")
        while low < order.shape[0]:
            high = min(high, most)
            some = 0
            for place in range(low, min(high, order.shape[0])):
                number = order[place]
                source, target = self.pairs[0, number], self.pairs[1, number]
                if self.in_time[number] and self._has_room(source, target, column, layers):
                    self.tried[0, some], self.tried[1, some] = source, target
                    some += 1
            self._simulate(begin, end, slowest, some, known)
            best = 0
            for place in range(some):
                if self.found[place] < self.found[best]:
                    best = place
            if some and self.found[best] < known:
                partitions[self.tried[0, best], column] -= 1
                partitions[self.tried[1, best], column] += 1
                seconds[column] = self.found[best]
                return True
            low, high = high, 3 * high
        return False

    cdef _rank(
        self, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t slowest, Py_ssize_t column, const long[::1] layers,
        double known,
    ):
        """Lists the moves that could gain, and returns how much, negative."""
        cdef Replica one = self.replicas[self.members[slowest, 0]]
        cdef Py_ssize_t source, target, parts = one.parts, count = 0, member, number
        cdef int stages = one.stages, off, onto
        cdef long held
        cdef double gain
        cdef double[::1] slopes = one.slopes
        for onto in range(stages):
            held = 0
            for target in range(onto, parts, stages):
                held += layers[target]
            self.has_room[onto] = held < self.capacity[onto, column]
        for source in range(parts):
            off = self.stage[source]
            for target in range(parts if layers[source] > 0 else 0):
                gain = slopes[source] - slopes[target]
                if gain > 0 and (self.has_room[self.stage[target]] or self.stage[target] == off):
                    self.pairs[0, count], self.pairs[1, count], self.gains[count] = source, target, -gain
                    self.in_time[count] = True
                    count += 1
        for member in range(begin, end):
            one = self.replicas[self.members[member, 0]]
            for number in range(count):
                off, onto = self.stage[self.pairs[0, number]], self.stage[self.pairs[1, number]]
                if off != onto and not one.done[onto] - (one.of_stage(18)[off] if off < onto else 0.0) < known:
                    self.in_time[number] = False
        return self.gains.base[:count]

    cdef bint _has_room(self, Py_ssize_t source, Py_ssize_t target, Py_ssize_t column, const long[::1] layers) noexcept:
        """Whether chunks together fit once a layer has moved."""
        cdef Py_ssize_t moment, part, stages = self.capacity.shape[0]
        cdef double taken
        for moment in range(self.shares.shape[0]):
            taken = 0.0
            for part in range(target % stages, layers.shape[0], stages):
                taken += self.shares[moment, part, column] * layers[part]
            taken += self.shares[moment, target, column]
            if source % stages == target % stages:
                taken -= self.shares[moment, source, column]
            if not taken <= self.full:
                return False
        return True

    cdef void _simulate(self, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t slowest, Py_ssize_t moves, double limit):
        """Finds what iterations take after the moves that are `tried`, if that is less than the limit: first of the
        slowest replica, since what that leaves out the others need not look at."""
        cdef Py_ssize_t turn, place, some, member
        cdef Replica one
        for place in range(moves):
            self.found[place] = 0.0
        for turn in range(begin - 1, end):
            if turn == slowest:
                continue
            some, member = 0, slowest if turn < begin else turn
            for place in range(moves):
                if self.found[place] < limit:
                    self.left[0, some], self.left[1, some] = self.tried[0, place], self.tried[1, place]
                    self.left[2, some] = place
                    some += 1
            one = self.replicas[self.members[member, 0]]
            one.move(self.left, some, limit, &self.seconds[0])
            for place in range(some):
                self.found[self.left[2, place]] = max(self.found[self.left[2, place]], self.seconds[place])
