"""What loops over columns share."""


cdef inline void sort_column(Py_ssize_t[::1] order, const double[:, :] values, Py_ssize_t column) noexcept:
    """Fill `order` with the rows of a column from the least value on; of equal ones the first comes first. Columns are
    short, and mostly in order."""
    cdef Py_ssize_t row, place
    for row in range(values.shape[0]):
        place = row
        while place > 0 and values[order[place - 1], column] > values[row, column]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = row
