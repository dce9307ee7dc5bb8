# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""What ranks do one after another, and when they are done: the loops of `fasop.simulation.ranks.columns`."""

import numpy as np

from libc.math cimport INFINITY

from fasop.compiled.passes cimport FORWARD, LANES, WEIGHT


cdef extern from *:
    """
    #define RECEIVE 4
    #define SEND_FORWARD 5
    /* Steps of ranks with LANES partitions at once; for what they take see `rank_ends`. */
    #define STEPS(NAME, WIDTH, TARGET) \
    VECTORS(NAME, WIDTH, TARGET) \
    TARGET static void NAME##_steps(const int *step, Py_ssize_t count, double *now, double *arrives, double *free, \
                                    const double *compute, const double *send, const double *busy, const int *row, \
                                    const int *link, int ranks) { \
        for (; count; count--, step += 3) { \
            int does = step[0], rank = step[1], way = does - SEND_FORWARD; \
            double *here = now + LANES * (Py_ssize_t)rank, *there = arrives + LANES * (Py_ssize_t)step[2]; \
            const double *takes = compute + LANES * (4 * (Py_ssize_t)row[rank] + does); \
            if (does >= RECEIVE) \
                takes = send + LANES * (2 * (Py_ssize_t)row[rank] + way); \
            for (int lane = 0; lane < LANES; lane += WIDTH) { \
                NAME##_some done = *(NAME##_some *)(here + lane); \
                if (does < RECEIVE) \
                    *(NAME##_some *)(here + lane) = done + *(const NAME##_some *)(takes + lane); \
                else if (does == RECEIVE) \
                    *(NAME##_some *)(here + lane) = NAME##_later(done, *(NAME##_some *)(there + lane)); \
                else { \
                    double *queue = free + LANES * (Py_ssize_t)link[ranks * way + rank] + lane; \
                    const double *holds = busy + LANES * (2 * (Py_ssize_t)row[rank] + way) + lane; \
                    done = NAME##_later(done, *(NAME##_some *)queue); \
                    *(NAME##_some *)queue = done + *(const NAME##_some *)holds; \
                    *(NAME##_some *)(there + lane) = done + *(const NAME##_some *)(takes + lane); \
                } \
            } \
        } \
    }
    OF_EACH_WIDTH(STEPS)
    #define STEPPED WIDEST(_steps)
    """
    enum:
        RECEIVE
        SEND_FORWARD
    void STEPPED(const int *, Py_ssize_t, double *, double *, double *, const double *, const double *, const double *,
                 const int *, const int *, int) noexcept


def rank_steps(lists, const int[:, ::1] places, const int[::1] tensors, const int[::1] replicas, int micro_batches):
    """What `fasop.simulation.ranks.columns` has ranks do, each step behind what it waits for.

    Args:
        lists: [ranks][passes, 2]: kind and micro-batch, of a replica counted from 0.
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
                if not even:
                    m = m * replicas[stage] + places[rank, 1]
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


cdef void _load(
    double[:, :, ::1] block, const double[:, :, :] every, const long[:, :] layers, const int[::1] stage,
    Py_ssize_t first,
) noexcept:
    """Takes LANES partitions from the first one on; behind the last one that again."""
    cdef Py_ssize_t row, kind, lane, column, last = layers.shape[1] - 1
    for row in range(every.shape[0]):
        for lane in range(LANES):
            column = layers[stage[row], min(first + lane, last)]
            for kind in range(every.shape[1]):
                block[row, kind, lane] = every[row, kind, column]


def rank_seconds(
    const int[:, ::1] steps, int messages, const double[:, :, :] compute, const double[:, :, :] send,
    const double[:, :, :] busy, const double[:, :, :] ends, double embedding, const int[::1] stage,
    const int[::1] row, const int[:, ::1] link, const long[:, :] layers,
):
    """[partitions]: from the end of one iteration to the end of the next.

    Args:
        steps: as `rank_steps` returns them.
        messages: more than the number of any.
        compute: [rows, kinds, columns]
        send: [rows, 2, columns]: what a message takes forward and backward.
        busy: [rows, 2, columns]: for how long it occupies its link.
        ends: [rows, 2, columns]: the optimizer's step, and the sums of gradients.
        embedding: the sum of its gradients by the first and the last stage, where there are several.
        stage: [rows]: whose times a row has.
        row: [ranks]: which row has a rank's times.
        link: [2, ranks]: the number of the link of a rank's messages.
        layers: [stages, partitions]: which column has the times of a stage.
    """
    cdef int ranks = row.shape[0], stages = layers.shape[0], rank, own
    cdef Py_ssize_t first, lane, rows = compute.shape[0]
    cdef double[:, :, ::1] taken = np.empty((rows, 4, LANES)), sent = np.empty((rows, 2, LANES))
    cdef double[:, :, ::1] held = np.empty((rows, 2, LANES)), around = np.empty((rows, 2, LANES))
    cdef double[:, ::1] now = np.empty((ranks, LANES)), arrives = np.empty((messages, LANES))
    cdef double[:, ::1] free = np.empty((2 * ranks, LANES))
    cdef double[:, :, ::1] done = np.empty((2, stages, LANES))  # of each stage: its last rank, and its longest sums
    cdef double[::1] found = np.empty(layers.shape[1])
    cdef double begun, summed, last
    for first in range(0, layers.shape[1], LANES):
        _load(taken, compute, layers, stage, first)
        _load(sent, send, layers, stage, first)
        _load(held, busy, layers, stage, first)
        _load(around, ends, layers, stage, first)
        free[:] = 0
        done[:] = -INFINITY
        for lane in range(LANES):
            begun = around[0, 0, lane]
            for own in range(rows):
                begun = min(begun, around[own, 0, lane])
            for rank in range(ranks):
                now[rank, lane] = around[row[rank], 0, lane] - begun
        STEPPED(
            &steps[0, 0], steps.shape[0], &now[0, 0], &arrives[0, 0], &free[0, 0], &taken[0, 0, 0], &sent[0, 0, 0],
            &held[0, 0, 0], &row[0], &link[0, 0], ranks,
        )
        for lane in range(min(LANES, layers.shape[1] - first)):
            begun = around[0, 0, lane]
            for own in range(rows):
                begun = min(begun, around[own, 0, lane])
                done[1, stage[own], lane] = max(done[1, stage[own], lane], around[own, 1, lane])
            for rank in range(ranks):
                own = stage[row[rank]]
                done[0, own, lane] = max(done[0, own, lane], now[rank, lane])
            last = -INFINITY
            for own in range(stages):
                summed = done[0, own, lane] + done[1, own, lane]
                last = max(last, summed)
                if stages > 1 and (own == 0 or own == stages - 1):
                    last = max(last, summed + embedding)
            found[first + lane] = last + begun
    return found.base
