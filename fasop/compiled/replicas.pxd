from fasop.compiled.replays cimport Pipelines, TracedPipeline


cdef class Replica:
    cdef int stages, parts
    cdef const int[:, ::1] actions
    cdef const unsigned char[::1] one_way
    cdef const double[::1] shares
    cdef const double[:, ::1] table
    cdef const double *row
    cdef Pipelines some, in_queues
    cdef TracedPipeline one, one_in_queues
    cdef double[:, :, :, ::1] compute
    cdef double[:, :, ::1] send, busy, start, exposed
    cdef double[:, ::1] after
    cdef double[::1] slopes, done, ends
    cdef Py_ssize_t[:, ::1] again
    cdef double total
    cdef bint queued

    cdef const double *of_stage(self, int number) noexcept
    cdef void begin(self, Py_ssize_t column, const long *layers, double known) noexcept
    cdef void _hold(self, int stage, int more, long count, double most) noexcept
    cdef void _find_slopes(self, TracedPipeline one, const long *layers, int last, double most) noexcept
    cdef bint _may_queue(self, int first, int end) noexcept
    cdef void move(self, Py_ssize_t[:, ::1] moves, Py_ssize_t count, double limit, double *found) noexcept
    cdef void _replay(self, Pipelines some, Py_ssize_t[:, ::1] moves, Py_ssize_t count, double *found) noexcept
