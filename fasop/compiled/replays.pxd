cdef class Pipelines:
    cdef int stages, parts, slots, queues, lanes
    cdef double[::1] space
    cdef double *compute
    cdef double *send
    cdef double *busy
    cdef double *now
    cdef double *free
    cdef int[:, ::1] link

    cdef void load(
        self, Py_ssize_t lane, const double[:, :, :] compute, const double[:, :, :] send, const double[:, :] start,
        const double[:, :, :] busy, Py_ssize_t column,
    ) noexcept
    cdef void change(self, Py_ssize_t lane, const double[:, :, :] compute, int part, Py_ssize_t column) noexcept
    cdef void replay(self, const int[:, ::1] actions) noexcept
    cdef void _free_links(self) noexcept


cdef class TracedPipeline(Pipelines):
    cdef const int[:, ::1] actions
    cdef const double[::1] shares
    cdef unsigned char[::1] waited, queued
    cdef double[:, ::1] passes, messages
    cdef double[::1] here, behind
    cdef double total

    cdef int trace(self, const double[:] after) noexcept
