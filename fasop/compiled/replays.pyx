# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Replays of schedules, action by action, for eight pipelines at once: the loops of `fasop.simulation.vectorised`.

Sums and maxima are those of the arrays there, in the order in which each stage takes them, so times are equal to the
last bit.
"""

import numpy as np

from libc.math cimport INFINITY

from fasop.compiled.passes cimport FORWARD, LANES, WEIGHT


cdef extern from *:
    """
    /* Actions of LANES pipelines at once. */
    #define COLUMNS 7
    #define REPLAY(NAME, WIDTH, TARGET) \
    VECTORS(NAME, WIDTH, TARGET) \
    TARGET static void NAME##_replay(const int *action, Py_ssize_t count, double *ends, const double *compute, \
                                     const double *send) { \
        for (; count; count--, action += COLUMNS) { \
            double *now = ends + LANES * (Py_ssize_t)action[1], *message = ends + LANES * (Py_ssize_t)action[4]; \
            const double *other = ends + LANES * (Py_ssize_t)action[3]; \
            const double *takes = compute + LANES * (Py_ssize_t)action[5]; \
            const double *sends = send + LANES * (Py_ssize_t)action[6]; \
            for (int lane = 0; lane < LANES; lane += WIDTH) { \
                NAME##_some done = NAME##_later(*(NAME##_some *)(now + lane), *(const NAME##_some *)(other + lane)); \
                done += *(const NAME##_some *)(takes + lane); \
                *(NAME##_some *)(now + lane) = done; \
                *(NAME##_some *)(message + lane) = done + *(const NAME##_some *)(sends + lane); \
            } \
        } \
    } \
    TARGET static void NAME##_in_queues(const int *action, Py_ssize_t count, double *ends, const double *compute, \
                                        const double *send, double *free, const double *busy, const int *link, \
                                        int parts) { \
        for (; count; count--, action += COLUMNS) { \
            double *now = ends + LANES * (Py_ssize_t)action[1], *message = ends + LANES * (Py_ssize_t)action[4]; \
            const double *other = ends + LANES * (Py_ssize_t)action[3]; \
            const double *takes = compute + LANES * (Py_ssize_t)action[5]; \
            const double *sends = send + LANES * (Py_ssize_t)action[6]; \
            const double *holds = busy + LANES * (Py_ssize_t)((action[0] ? parts : 0) + action[2]); \
            double *queue = free + LANES * (Py_ssize_t)link[action[6]]; \
            for (int lane = 0; lane < LANES; lane += WIDTH) { \
                NAME##_some done = NAME##_later(*(NAME##_some *)(now + lane), *(const NAME##_some *)(other + lane)); \
                done += *(const NAME##_some *)(takes + lane); \
                *(NAME##_some *)(now + lane) = done; \
                if (action[0] == WEIGHT) \
                    continue; \
                done = NAME##_later(done, *(NAME##_some *)(queue + lane)); \
                *(NAME##_some *)(queue + lane) = done + *(const NAME##_some *)(holds + lane); \
                *(NAME##_some *)(message + lane) = done + *(const NAME##_some *)(sends + lane); \
            } \
        } \
    }
    OF_EACH_WIDTH(REPLAY)
    #define REPLAYED WIDEST(_replay)
    #define REPLAYED_IN_QUEUES WIDEST(_in_queues)
    """
    enum:
        COLUMNS
    void REPLAYED(const int *, Py_ssize_t, double *, const double *, const double *) noexcept
    void REPLAYED_IN_QUEUES(const int *, Py_ssize_t, double *, const double *, const double *, double *,
                            const double *, const int *, int) noexcept


cdef int _source(int kind, int part, int parts) noexcept:
    """The number of the messages that a pass waits for, those back behind those forward; -1 where there are none."""
    if kind == FORWARD:
        return part - 1
    return parts + part + 1 if kind != WEIGHT and part < parts - 1 else -1


def ordered(lists, int chunks):
    """The actions of all stages in an order in which each can be done, and the number of slots of their messages.

    Each stage in turn does one action, so that few actions wait for the one before: a processor does several of them at
    once, in less than half the time that it takes for those of one stage after another.

    Args:
        lists: [stages][actions, 3]: kind, micro-batch and chunk.

    Returns:
        [actions, COLUMNS]: kind, stage and part; of the ends of all stages, with the arrivals of messages in their
        slots behind them, the one that it waits for, its stage's own where that is none, and the one of the message
        that it sends, the last one of a pass that sends none; its row in what passes take, and in what messages take.

    Raises:
        ValueError: the schedule never ends.
    """
    cdef int stages = len(lists), parts = len(lists) * chunks, stage, part, kind, m, own, other, depth = 1
    cdef Py_ssize_t count = sum(len(own_list) for own_list in lists), found = 0, done
    cdef int[:, ::1] every = np.concatenate(lists)
    cdef int[::1] place = np.cumsum([0, *(len(own_list) for own_list in lists)], dtype=np.intc)
    cdef int[::1] begin = np.array(place), sent = np.full(2 * parts, -1, np.intc), read = np.full(2 * parts, -1, np.intc)
    cdef int[:, ::1] rows = np.empty((count, COLUMNS), np.intc)
    cdef unsigned char[::1] waits = np.empty(stages, np.uint8)
    while found < count:
        done = found
        for stage in range(stages):  # with what others have sent before
            waits[stage] = 1
            if place[stage] < begin[stage + 1]:
                kind, m = every[place[stage], 0], every[place[stage], 1]
                part = every[place[stage], 2] * stages + stage
                other = _source(kind, part, parts)
                waits[stage] = other >= 0 and sent[other] < m
        for stage in range(stages):
            if waits[stage]:
                continue
            kind, m = every[place[stage], 0], every[place[stage], 1]
            part = every[place[stage], 2] * stages + stage
            own, other = part if kind == FORWARD else parts + part, _source(kind, part, parts)
            rows[found, 0], rows[found, 1], rows[found, 2], rows[found, 3], rows[found, 4] = kind, stage, part, other, -1
            rows[found, 5], rows[found, 6] = kind * parts + part, stage if kind == FORWARD else stages + stage
            if other >= 0:
                read[other] = m
            if kind != WEIGHT:
                rows[found, 4] = own
                sent[own] = m
                if own != parts - 1 and own != parts:  # nobody reads those of the model's ends
                    depth = max(depth, m - read[own])
            place[stage] += 1
            found += 1
        if found == done:
            raise ValueError("the schedule deadlocks")
    for stage in range(stages):
        place[stage] = begin[stage]
    for found in range(count):
        stage = rows[found, 1]
        m = every[place[stage], 1] % depth
        place[stage] += 1
        rows[found, 3] = stages + rows[found, 3] * depth + m if rows[found, 3] >= 0 else stage
        rows[found, 4] = stages + (rows[found, 4] * depth + m if rows[found, 4] >= 0 else 2 * parts * depth)
    return rows.base, 2 * parts * depth + 1


cdef class Pipelines:
    """The times of one pipeline, or of LANES at once, which take hardly longer; and in `now`, one behind the other, when
    stages are done and messages arrive: [rows, lanes] each."""

    def __init__(self, int stages, int parts, int slots, link, int lanes):
        """Vectors of all lanes begin with a line of the cache."""
        self.stages, self.parts, self.slots = stages, parts, slots
        self.queues, self.lanes = link is not None, lanes
        self.space = np.zeros(lanes * (6 * parts + 5 * stages + slots) + LANES)
        self.compute = &self.space[LANES - <Py_ssize_t>&self.space[0] % (8 * LANES) // 8]
        self.send = self.compute + lanes * 4 * parts
        self.busy = self.send + lanes * 2 * stages
        self.now = self.busy + lanes * 2 * parts
        self.free = self.now + lanes * (stages + slots)
        if self.queues:
            self.link = link

    cdef void load(
        self, Py_ssize_t lane, const double[:, :, :] compute, const double[:, :, :] send, const double[:, :] start,
        const double[:, :, :] busy, Py_ssize_t column,
    ) noexcept:
        cdef int kind, at
        for kind in range(4):
            for at in range(self.parts):
                self.compute[self.lanes * (kind * self.parts + at) + lane] = compute[kind, at, column]
        for kind in range(2):
            for at in range(self.stages):
                self.send[self.lanes * (kind * self.stages + at) + lane] = send[kind, at, column]
            for at in range(self.parts if self.queues else 0):
                self.busy[self.lanes * (kind * self.parts + at) + lane] = busy[kind, at, column]
        for at in range(self.stages):
            self.now[self.lanes * at + lane] = start[at, column]

    cdef void change(self, Py_ssize_t lane, const double[:, :, :] compute, int part, Py_ssize_t column) noexcept:
        """What one part takes."""
        cdef int kind
        for kind in range(4):
            self.compute[self.lanes * (kind * self.parts + part) + lane] = compute[kind, part, column]

    cdef void replay(self, const int[:, ::1] actions) noexcept:
        """Goes through all actions of LANES pipelines."""
        self._free_links()
        if self.queues:
            REPLAYED_IN_QUEUES(
                &actions[0, 0], actions.shape[0], self.now, self.compute, self.send, self.free, self.busy,
                &self.link[0, 0], self.parts,
            )
        else:
            REPLAYED(&actions[0, 0], actions.shape[0], self.now, self.compute, self.send)

    cdef void _free_links(self) noexcept:
        cdef int at
        for at in range(2 * self.lanes * self.stages if self.queues else 0):
            self.free[at] = -INFINITY


cdef class TracedPipeline(Pipelines):
    """One pipeline, and the chain of passes and messages that ends last: how often a pass is on it, and a message."""

    def __init__(self, const int[:, ::1] actions, int slots, int stages, int parts, link, const double[::1] shares):
        Pipelines.__init__(self, stages, parts, slots, link, 1)
        self.actions, self.shares = actions, shares
        self.waited, self.queued = np.zeros(len(actions), np.uint8), np.zeros(len(actions), np.uint8)
        self.passes, self.messages = np.empty((2, parts)), np.empty((2, stages))
        self.here, self.behind = np.empty(stages), np.empty(2 * stages)

    cdef int trace(self, const double[:] after) noexcept:
        """Goes through all actions, notes which waited for their message, and which of their messages for a link, and
        then goes back. Returns the stage that ends last, of equal ones the first; at its `here` the chain begins."""
        cdef Py_ssize_t number
        cdef int kind, stage, way, link, last = 0
        cdef double done, begin, other, sent, on_path
        self._free_links()
        for number in range(self.actions.shape[0]):
            kind, stage = self.actions[number, 0], self.actions[number, 1]
            done, other = self.now[stage], self.now[self.actions[number, 3]]
            self.waited[number] = other > done
            if other > done:
                done = other
            done += self.compute[self.actions[number, 5]]
            self.now[stage] = done
            if kind == WEIGHT:
                continue
            begin = done
            if self.queues:
                link = self.link[0 if kind == FORWARD else 1, stage]
                if self.free[link] > begin:
                    begin = self.free[link]
                other = self.busy[(0 if kind == FORWARD else self.parts) + self.actions[number, 2]]
                self.free[link] = begin + other
                self.queued[number] = begin > done
            self.now[self.actions[number, 4]] = begin + self.send[self.actions[number, 6]]
        for stage in range(self.stages):
            self.now[stage] += after[stage]
            if self.now[stage] > self.now[last]:
                last = stage
        self.total = self.now[last]
        self.passes[:], self.messages[:], self.here[:], self.behind[:] = 0.0, 0.0, 0.0, 0.0
        self.here[last] = 1
        for number in range(self.slots):
            self.now[self.stages + number] = 0
        for number in range(self.actions.shape[0] - 1, -1, -1):
            kind, stage = self.actions[number, 0], self.actions[number, 1]
            way = 0 if kind == FORWARD else 1
            on_path = self.here[stage]
            if kind != WEIGHT:
                sent = self.now[self.actions[number, 4]]
                self.now[self.actions[number, 4]] = 0
                if self.queues:
                    sent += self.behind[self.link[way, stage]]
                    self.behind[self.link[way, stage]] = sent if self.queued[number] else 0
                if self.actions[number, 2] != (0 if way else self.parts - 1):  # the model's ends send nothing
                    self.messages[way, stage] += sent
                on_path += 0 if self.queues and self.queued[number] else sent
            self.passes[way, self.actions[number, 2]] += self.shares[kind] * on_path
            if kind == WEIGHT:
                continue
            self.here[stage] = 0 if self.waited[number] else on_path
            if self.actions[number, 3] >= self.stages:
                self.now[self.actions[number, 3]] = on_path if self.waited[number] else 0
        return last


def ends(
    const int[:, ::1] actions, int slots, const double[:, :, :] compute, const double[:, :, :] send,
    const double[:, :] start, const double[:, :, :] busy, link,
):
    """[stages, pipelines]: when each stage has done its last action.

    Args:
        actions: as `ordered` returns them, with the number of `slots`.
        compute: [kinds, parts, pipelines]
        send: [2, stages, pipelines]: forward and backward.
        start: [stages, pipelines]
        busy: [2, parts, pipelines]: for how long a message occupies its link.
        link: [2, stages]: the number of the link of a stage's messages; None where none waits for a link.
    """
    cdef int stages = start.shape[0], parts = compute.shape[1], stage
    cdef Py_ssize_t column, lane, pipelines = start.shape[1]
    cdef double[:, ::1] found = np.empty((stages, pipelines))
    cdef Pipelines some = Pipelines(stages, parts, slots, link, LANES)
    for column in range(0, pipelines, LANES):
        for lane in range(LANES):
            some.load(lane, compute, send, start, busy, min(column + lane, pipelines - 1))
        some.replay(actions)
        for stage in range(stages):
            for lane in range(min(LANES, pipelines - column)):
                found[stage, column + lane] = some.now[LANES * stage + lane]
    return found.base


def longest(
    const int[:, ::1] actions, int slots, const double[:, :, :] compute, const double[:, :, :] send,
    const double[:, :] start, const double[:, :, :] busy, link, const double[:, :] after, const double[::1] shares,
):
    """What `vectorised.Longest` has, in its order. `after` [stages, pipelines] comes after a stage's last action, and
    `shares` [kinds] is what part of a pass a kind is; the rest as for `ends`."""
    cdef int stages = start.shape[0], parts = compute.shape[1], last
    cdef Py_ssize_t column, pipelines = start.shape[1]
    cdef TracedPipeline one = TracedPipeline(actions, slots, stages, parts, link, shares)
    cdef double[:, :, ::1] passes = np.empty((2, parts, pipelines)), messages = np.empty((2, stages, pipelines))
    cdef double[:, ::1] begun = np.empty((stages, pipelines)), end = np.zeros((stages, pipelines))
    cdef double[::1] total = np.empty(pipelines)
    for column in range(pipelines):
        one.load(0, compute, send, start, busy, column)
        last = one.trace(after[:, column])
        total[column], end[last, column] = one.total, 1
        passes[:, :, column], messages[:, :, column], begun[:, column] = one.passes, one.messages, one.here
    return *passes.base, begun.base, end.base, total.base, messages.base
