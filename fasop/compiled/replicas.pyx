# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Replicas of a pipeline of which a layer moves: what `fasop.compiled.climbs` tries."""

import numpy as np

from libc.math cimport INFINITY

from fasop.compiled.passes cimport LANES
from fasop.compiled.replays cimport Pipelines, TracedPipeline


cdef enum:
    OF_PARTS = 5
    OF_STAGES = 20


cdef class Replica:
    """Pipelines whose replicas are alike, and of one of them what takes how long with a partition.

    Args:
        actions: as `ordered` returns them, with the number of `slots`.
        chunks: of each stage.
        link: [2, stages]: the number of the link of a stage's messages.
        one_way: [stages]: whether messages to both neighbours leave by one link.
        shares: [kinds]: what part of a pass a kind is.
        table: [pipelines, rows], see `fasop.partition.climbing`.
    """

    def __init__(
        self, const int[:, ::1] actions, int slots, int chunks, link, const unsigned char[::1] one_way,
        const double[::1] shares, const double[:, ::1] table,
    ):
        cdef int stages = len(one_way), parts = chunks * len(one_way)
        self.stages, self.parts, self.actions, self.one_way = stages, parts, actions, one_way
        self.shares, self.table = shares, table
        self.some = Pipelines(stages, parts, slots, None, LANES)
        self.in_queues = Pipelines(stages, parts, slots, link, LANES)
        self.one = TracedPipeline(actions, slots, stages, parts, None, shares)
        self.one_in_queues = TracedPipeline(actions, slots, stages, parts, link, shares)
        self.compute, self.send = np.empty((3, 4, parts, 1)), np.empty((2, stages, 1))
        self.busy = np.empty((2, parts, 1))
        self.start, self.exposed = np.empty((3, stages, 1)), np.empty((3, stages, 1))
        self.after, self.slopes, self.done = np.empty((stages, 1)), np.empty(parts), np.empty(stages)
        self.ends, self.again = np.empty(parts * parts), np.empty((3, parts * parts), np.intp)

    cdef const double *of_stage(self, int number) noexcept:
        return self.row + OF_PARTS * self.parts + number * self.stages

    cdef void begin(self, Py_ssize_t column, const long *layers, double known) noexcept:
        """Takes one of the pipelines, with these layers of its parts. `known` seconds are those of an iteration;
        negative where they are not."""
        cdef int part, stage, kind, more, parts = self.parts, stages = self.stages, last
        cdef long count
        cdef double taken, whole, most, embedding, ending, way
        cdef const double *forward = &self.table[column, 0]
        self.row = forward
        embedding, ending, most = self.of_stage(OF_STAGES)[0], self.of_stage(OF_STAGES)[1], self.of_stage(OF_STAGES)[2]
        for part in range(parts):
            for more in range(3):
                count = layers[part] + more - 1
                self.compute[more, 0, part, 0] = forward[part] + count * forward[parts + part]
                taken = forward[2 * parts + part] + count * forward[3 * parts + part]
                taken += min(<double>count, most) * forward[4 * parts + part]
                for kind in range(1, 4):
                    self.compute[more, kind, part, 0] = self.shares[kind] * taken
        way = 0.0
        for stage in range(stages):
            count = 0
            for part in range(stage, parts, stages):
                count += layers[part]
                self.busy[0, part, 0] = self.of_stage(2)[stage] if part < parts - 1 else 0.0
                self.busy[1, part, 0] = self.of_stage(3)[stage] if part else 0.0
            self.send[0, stage, 0], self.send[1, stage, 0] = self.of_stage(0)[stage], self.of_stage(1)[stage]
            for more in range(3):
                self._hold(stage, more, count + more - 1, most)
            self.after[stage, 0] = self.exposed[1, stage, 0]
            if stage == 0 or stage == stages - 1:
                self.after[stage, 0] += embedding
            taken = self.of_stage(17)[stage] + count * self.of_stage(18)[stage] + self.of_stage(19)[stage]
            way += taken
            whole = self.of_stage(15)[stage] + (count + 1) * self.of_stage(16)[stage]
            self.done[stage] = way - taken + whole + ending
        self.one.load(0, self.compute[1], self.send, self.start[1], self.busy, 0)
        last = self.one.trace(self.after[:, 0])
        self._find_slopes(self.one, layers, last, most)
        if self._may_queue(1, 2) and (known < 0 or known > self.total * (1 + 1e-12)):
            self.one_in_queues.load(0, self.compute[1], self.send, self.start[1], self.busy, 0)
            last = self.one_in_queues.trace(self.after[:, 0])
            if known >= 0 or self.one_in_queues.total > self.total * (1 + 1e-12):
                self._find_slopes(self.one_in_queues, layers, last, most)
        self.queued = self._may_queue(0, 3)

    cdef void _hold(self, int stage, int more, long count, double most) noexcept:
        """Notes what a stage of so many layers begins and ends with."""
        cdef double whole = self.of_stage(6)[stage] + count * self.of_stage(7)[stage], hidden, beside
        hidden = self.of_stage(8)[stage] + count * self.of_stage(9)[stage]
        hidden += min(<double>count, most) * self.of_stage(10)[stage]
        beside = max(0.0, self.of_stage(12)[stage] + count * self.of_stage(13)[stage])
        beside += min(1, count) * self.of_stage(14)[stage]
        self.start[more, stage, 0] = self.of_stage(4)[stage] + count * self.of_stage(5)[stage]
        self.exposed[more, stage, 0] = min(whole, max(whole - hidden, self.of_stage(11)[stage])) + beside

    cdef void _find_slopes(self, TracedPipeline one, const long *layers, int last, double most) noexcept:
        """Notes what the longest path takes, and what it gains with a layer of each part."""
        cdef int part, stage, parts = self.parts
        cdef long count
        cdef double whole, hidden, left, slope
        self.total = one.total
        for stage in range(self.stages):
            count = 0
            for part in range(stage, parts, self.stages):
                count += layers[part]
            slope = 0.0
            if stage == last:
                whole = self.of_stage(6)[stage] + count * self.of_stage(7)[stage]
                hidden = self.of_stage(8)[stage] + count * self.of_stage(9)[stage]
                hidden += min(<double>count, most) * self.of_stage(10)[stage]
                left = min(whole, max(whole - hidden, self.of_stage(11)[stage]))
                if left == whole:
                    slope = self.of_stage(7)[stage]
                elif left != self.of_stage(11)[stage]:
                    slope = self.of_stage(7)[stage] - self.of_stage(9)[stage]
                if self.of_stage(12)[stage] + count * self.of_stage(13)[stage] > 0:
                    slope += self.of_stage(13)[stage]
            slope += one.here[stage] * self.of_stage(5)[stage]
            for part in range(stage, parts, self.stages):
                self.slopes[part] = one.passes[0, part] * self.row[parts + part]
                self.slopes[part] += one.passes[1, part] * self.row[3 * parts + part]
                self.slopes[part] += slope

    cdef bint _may_queue(self, int first, int end) noexcept:
        """What `vectorised.may_queue` says of the shortest passes, with a layer less or more or as many."""
        cdef int stage, part, more, stages = self.stages
        cdef bint ends, chunks = self.parts > stages
        cdef double ahead, back
        for stage in range(stages):
            ahead, back = INFINITY, INFINITY
            for part in range(stage, self.parts, stages):
                for more in range(first, end):
                    ahead = min(ahead, self.compute[more, 0, part, 0])
                    back = min(back, self.compute[more, 2, part, 0])
            if (chunks or stage < stages - 1) and self.of_stage(2)[stage] > ahead:
                return True
            if (chunks or stage) and self.of_stage(3)[stage] > back:
                return True
            if self.one_way[stage] and (chunks or 0 < stage < stages - 1):
                if self.of_stage(3)[stage] > ahead or self.of_stage(2)[stage] > back:
                    return True
        return False

    cdef void move(self, Py_ssize_t[:, ::1] moves, Py_ssize_t count, double limit, double *found) noexcept:
        """Finds the seconds of an iteration once a layer has gone from a part to another one, for so many `moves` [2,
        moves]. What is not below the limit may come out too low, but not below the limit."""
        cdef Py_ssize_t number, some = 0
        self._replay(self.some, moves, count, found)
        for number in range(count if self.queued else 0):
            if found[number] < limit:
                self.again[0, some], self.again[1, some] = moves[0, number], moves[1, number]
                self.again[2, some] = number
                some += 1
        if some:
            self._replay(self.in_queues, self.again, some, &self.ends[0])
        for number in range(some):
            found[self.again[2, number]] = self.ends[number]

    cdef void _replay(self, Pipelines some, Py_ssize_t[:, ::1] moves, Py_ssize_t count, double *found) noexcept:
        cdef int stages = self.stages, stage, off, onto, changed
        cdef Py_ssize_t move, lane, number, before
        cdef double own, last, ends, embedding = self.of_stage(OF_STAGES)[0]
        for lane in range(LANES if count else 0):
            some.load(lane, self.compute[1], self.send, self.start[1], self.busy, 0)
        for move in range(0, count, LANES):
            for lane in range(LANES):
                number, before = min(move + lane, count - 1), move + lane - LANES
                off, onto = moves[0, number] % stages, moves[1, number] % stages
                if move:
                    some.change(lane, self.compute[1], moves[0, before], 0)
                    some.change(lane, self.compute[1], moves[1, before], 0)
                    for stage in range(stages):
                        some.now[LANES * stage + lane] = self.start[1, stage, 0]
                some.change(lane, self.compute[0], moves[0, number], 0)
                some.change(lane, self.compute[2], moves[1, number], 0)
                if off != onto:
                    some.now[LANES * off + lane] = self.start[0, off, 0]
                    some.now[LANES * onto + lane] = self.start[2, onto, 0]
            some.replay(self.actions)
            for lane in range(min(LANES, count - move)):
                number = move + lane
                off, onto = moves[0, number] % stages, moves[1, number] % stages
                last, ends = -INFINITY, -INFINITY
                for stage in range(stages):
                    changed = 1 if off == onto else 0 if stage == off else 2 if stage == onto else 1
                    own = some.now[LANES * stage + lane] + self.exposed[changed, stage, 0]
                    last = max(last, own)
                    if stage == 0 or stage == stages - 1:
                        ends = max(ends, own)
                found[number] = max(last, ends + embedding)
