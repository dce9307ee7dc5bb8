# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""What ranks do one after another, and when they are done: the loops of `fasop.simulation.ranks.columns`."""

import numpy as np

from fasop.compiled.passes cimport FORWARD, LANES, WEIGHT


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
