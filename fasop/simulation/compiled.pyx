# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops of `fasop.simulation.vectorised`, compiled: action by action, for eight pipelines at once; and those of
`fasop.simulation.ranks.columns`, and of bounds of many layouts (`fasop.search.by_stage`).

Sums and maxima are those of the arrays there, in the order in which each stage takes them, so times are equal to the
last bit. Kinds of passes are numbers of `fasop.simulation.steps.Pass`.

Results are returned as the arrays that they were made as (`base`): to make an array of a memoryview takes numpy longer.
"""

import numpy as np

from libc.math cimport INFINITY, floor
from libc.stdlib cimport qsort

cdef enum:
    FORWARD = 0

cdef extern from *:
    """
    /* Actions of LANES pipelines at once. Compilers do not turn a loop with a maximum into vector instructions by
       themselves, and each processor is the fastest with the widest vectors that it has. */
    #define LANES 8
    #define COLUMNS 7
    #define REPLAY(NAME, WIDTH, TARGET) \
    typedef double NAME##_some __attribute__((vector_size(8 * WIDTH), aligned(8), may_alias)); \
    typedef long long NAME##_mask __attribute__((vector_size(8 * WIDTH))); \
    TARGET static inline NAME##_some NAME##_later(NAME##_some one, NAME##_some other) { \
        NAME##_mask later = other > one; \
        return (NAME##_some)((later & (NAME##_mask)other) | (~later & (NAME##_mask)one)); \
    } \
    TARGET static void NAME(const int *action, Py_ssize_t count, double *ends, const double *compute, \
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
    #define WEIGHT 3
    REPLAY(replay_by_2, 2, )
    #ifdef __x86_64__
    REPLAY(replay_by_4, 4, __attribute__((target("avx2"))))
    REPLAY(replay_by_8, 8, __attribute__((target("avx512f"))))
    #define WIDEST(NAME) (__builtin_cpu_supports("avx512f") ? replay_by_8##NAME : \
                          __builtin_cpu_supports("avx2") ? replay_by_4##NAME : replay_by_2##NAME)
    #else
    #define WIDEST(NAME) replay_by_2##NAME
    #endif
    #define REPLAYED WIDEST()
    #define REPLAYED_IN_QUEUES WIDEST(_in_queues)
    """
    enum:
        LANES
        COLUMNS
        WEIGHT
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


cdef class _Pipelines:
    """The times of one pipeline, or of LANES at once, which take hardly longer; and in `now`, one behind the other, when
    stages are done and messages arrive: [rows, lanes] each."""

    cdef int stages, parts, slots, queues, lanes
    cdef double[::1] space
    cdef double *compute
    cdef double *send
    cdef double *busy
    cdef double *now
    cdef double *free
    cdef int[:, ::1] link

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


cdef class _Traced(_Pipelines):
    """One pipeline, and the chain of passes and messages that ends last: how often a pass is on it, and a message."""

    cdef const int[:, ::1] actions
    cdef const double[::1] shares
    cdef unsigned char[::1] waited, queued
    cdef double[:, ::1] passes, messages
    cdef double[::1] here, behind
    cdef double total

    def __init__(self, const int[:, ::1] actions, int slots, int stages, int parts, link, const double[::1] shares):
        _Pipelines.__init__(self, stages, parts, slots, link, 1)
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
    cdef _Pipelines some = _Pipelines(stages, parts, slots, link, LANES)
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
    cdef _Traced one = _Traced(actions, slots, stages, parts, link, shares)
    cdef double[:, :, ::1] passes = np.empty((2, parts, pipelines)), messages = np.empty((2, stages, pipelines))
    cdef double[:, ::1] begun = np.empty((stages, pipelines)), end = np.zeros((stages, pipelines))
    cdef double[::1] total = np.empty(pipelines)
    for column in range(pipelines):
        one.load(0, compute, send, start, busy, column)
        last = one.trace(after[:, column])
        total[column], end[last, column] = one.total, 1
        passes[:, :, column], messages[:, :, column], begun[:, column] = one.passes, one.messages, one.here
    return *passes.base, begun.base, end.base, total.base, messages.base


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

    cdef int stages, parts
    cdef const int[:, ::1] actions
    cdef const unsigned char[::1] one_way
    cdef const double[::1] shares
    cdef const double[:, ::1] table
    cdef const double *row
    cdef _Pipelines some, in_queues
    cdef _Traced one, one_in_queues
    cdef double[:, :, :, ::1] compute
    cdef double[:, :, ::1] send, busy, start, exposed
    cdef double[:, ::1] after
    cdef double[::1] slopes, done, ends
    cdef Py_ssize_t[:, ::1] again
    cdef double total
    cdef bint queued

    def __init__(
        self, const int[:, ::1] actions, int slots, int chunks, link, const unsigned char[::1] one_way,
        const double[::1] shares, const double[:, ::1] table,
    ):
        cdef int stages = len(one_way), parts = chunks * len(one_way)
        self.stages, self.parts, self.actions, self.one_way = stages, parts, actions, one_way
        self.shares, self.table = shares, table
        self.some = _Pipelines(stages, parts, slots, None, LANES)
        self.in_queues = _Pipelines(stages, parts, slots, link, LANES)
        self.one = _Traced(actions, slots, stages, parts, None, shares)
        self.one_in_queues = _Traced(actions, slots, stages, parts, link, shares)
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

    cdef void _find_slopes(self, _Traced one, const long *layers, int last, double most) noexcept:
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

    cdef void _replay(self, _Pipelines some, Py_ssize_t[:, ::1] moves, Py_ssize_t count, double *found) noexcept:
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


cdef enum:
    RECEIVE = 4
    SEND_FORWARD = 5
    SEND_BACKWARD = 6


def rank_steps(lists, const int[:, ::1] places, const int[::1] tensors, const int[::1] replicas, int micro_batches):
    """What `fasop.simulation.ranks.columns` has ranks do, each step behind what it waits for.

    Args:
        lists: [ranks][passes, 2]: kind and micro-batch.
        places: [ranks, 3]: stage, replica and place in the tensor group; ranks lie in that order.
        tensors, replicas: [stages]
        micro_batches: more than any number of one.

    Returns:
        [steps, 3]: what is done, by which rank, and the number of the message; 0 of a pass.

    Raises:
        ValueError: the schedule never ends.
    """
    cdef int ranks = len(lists), stages = len(tensors), rank, stage, way, other, peer, place, own, kind, m, slot, done = 1
    cdef bint even = len(set(replicas)) == 1
    cdef int[::1] first = np.cumsum([0, *np.multiply(tensors, replicas)], dtype=np.intc)
    cdef int[::1] at = np.cumsum([0, *map(len, lists)], dtype=np.intc), ends = np.array(at[1:])
    cdef int[:, ::1] every = np.concatenate(lists)
    cdef Py_ssize_t found = 0, most = len(every) * (2 + max(tensors))
    cdef unsigned char[::1] sent = np.zeros(2 * ranks * micro_batches, np.uint8)
    cdef int[:, ::1] steps = np.empty((most, 3), np.intc)
    while done:
        done = 0
        for rank in range(ranks):
            stage = places[rank, 0]
            while at[rank] < ends[rank]:
                kind, m = every[at[rank], 0], every[at[rank], 1]
                way = 0 if kind == FORWARD else 1
                if kind != WEIGHT and 0 <= stage - 1 + 2 * way < stages:
                    slot = (way * ranks + rank) * micro_batches + m
                    if not sent[slot]:
                        break
                    steps[found, 0], steps[found, 1], steps[found, 2] = RECEIVE, rank, slot
                    found += 1
                steps[found, 0], steps[found, 1], steps[found, 2] = kind, rank, 0
                found += 1
                other = stage + 1 - 2 * way
                if kind != WEIGHT and 0 <= other < stages:
                    peer = places[rank, 1] if even else m % replicas[other]
                    own = tensors[stage]
                    place = places[rank, 2]
                    while place < tensors[other]:
                        slot = (way * ranks + first[other] + peer * tensors[other] + place) * micro_batches + m
                        sent[slot] = 1
                        steps[found, 0], steps[found, 1], steps[found, 2] = SEND_FORWARD + way, rank, slot
                        found += 1
                        place += own
                at[rank] += 1
                done = 1
    for rank in range(ranks):
        if at[rank] < ends[rank]:
            raise ValueError("the schedule deadlocks")
    return steps.base[:found].copy()


def column_ends(
    const int[:, ::1] steps, int messages, const double[:, :, :, ::1] compute, const double[:, :, :, ::1] send,
    const double[:, :, :, ::1] busy, const double[:, :, ::1] start, const int[::1] row, const int[:, ::1] link,
):
    """[blocks, ranks, 8]: when each rank has done its last step, with each of 8 partitions of a block.

    Args:
        steps: as `rank_steps` returns them.
        messages: more than the number of any.
        compute: [blocks, rows, kinds, 8]
        send: [blocks, rows, 2, 8]: what a message takes forward and backward.
        busy: [blocks, rows, 2, 8]: for how long it occupies its link.
        start: [blocks, ranks, 8]
        row: [ranks]: which row has a rank's times.
        link: [2, ranks]: the number of the link of a rank's messages.
    """
    cdef Py_ssize_t block, number, column
    cdef int does, rank, way
    cdef double leaves
    cdef double *here
    cdef double *there
    cdef double *free
    cdef const double *takes
    cdef const double *holds
    cdef double[:, :, ::1] now = np.array(start)
    cdef double[:, ::1] arrives = np.empty((messages, LANES)), free_from = np.empty((2 * start.shape[1], LANES))
    for block in range(start.shape[0]):
        free_from[:] = 0
        for number in range(steps.shape[0]):
            does, rank = steps[number, 0], steps[number, 1]
            here = &now[block, rank, 0]
            if does < RECEIVE:
                takes = &compute[block, row[rank], does, 0]
                for column in range(LANES):
                    here[column] += takes[column]
            elif does == RECEIVE:
                there = &arrives[steps[number, 2], 0]
                for column in range(LANES):
                    here[column] = there[column] if there[column] > here[column] else here[column]
            else:
                way = does - SEND_FORWARD
                there, free = &arrives[steps[number, 2], 0], &free_from[link[way, rank], 0]
                takes, holds = &send[block, row[rank], way, 0], &busy[block, row[rank], way, 0]
                for column in range(LANES):
                    leaves = here[column] if here[column] > free[column] else free[column]
                    free[column] = leaves + holds[column]
                    there[column] = leaves + takes[column]
    return now.base


cdef inline double _ends(double embedding, double head, long stage, long last) noexcept nogil:
    return (embedding if stage == 0 else 0.0) + (head if stage == last else 0.0)


def chains_of_rows(
    const long[::1] rows, const unsigned char[:, :, ::1] present, const long[:, ::1] size, const long[:, ::1] first,
    const long[:, ::1] replicas, const long[::1] last, const unsigned char[::1] even, const long[:, :] ahead,
    const long[:, :] lag, left, const double[:, :] forward, const double[:, :] backward,
    const double[:, :, :] embedding, const double[:, :, :] head, int count, double share, double far,
):
    """What `fasop.search.by_stage.layout_bounds` does in `PlacedLayouts._chain_of_trip`, layout by layout.

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


def mean_of(
    const double[:, :] trip, const double[:, :] fixed, const double[:, :] layer, const double[:] layers, double tiny
):
    """What `fasop.partition.bounds.mean_of` does, whose arrays [stages, pipelines] these are, of so many `layers` of
    each pipeline."""
    cdef Py_ssize_t column, s, other, stages = trip.shape[0], columns = trip.shape[1]
    cdef double[::1] found = np.empty(columns), weights = np.empty(stages)
    cdef Py_ssize_t[::1] order = np.empty(stages, np.intp)
    cdef double shares, paid, level, price, total, lowest
    for column in range(columns):
        for s in range(stages):
            other = s
            while other > 0 and trip[order[other - 1], column] > trip[s, column]:
                order[other] = order[other - 1]
                other -= 1
            order[other] = s
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


def shortest_trip(
    const unsigned char[:, ::1] allowed, double seconds, const double[:, ::1] step, const double[:, ::1] there,
    const double[:, ::1] back, const double[:, ::1] there_and_back, const double[:, ::1] summed,
    const double[:, ::1] returned, const double[:, ::1] pair, const double[:, ::1] turned,
    const double[:, ::1] crossed, const double[:, ::1] trips, const double[:, :, ::1] rounds,
):
    """What `fasop.search.by_stage.whole_layers.StageTables.shortest_trip` does, whose tables these are."""
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
        for part in range(parts):
            other = part
            while other > 0 and layer[order[other - 1], column] > layer[part, column]:
                order[other] = order[other - 1]
                other -= 1
            order[other] = part
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
        whole = floor((largest - fixed[part, column]) / layer[part, column] + rounding) - least[part]
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
        for stage in range(stages):
            other = stage
            while other > 0 and trip[order[other - 1], column] > trip[stage, column]:
                order[other] = order[other - 1]
                other -= 1
            order[other] = stage
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
