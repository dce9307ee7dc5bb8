"""What all loops share: kinds of passes, numbered as in `fasop.simulation.steps.Pass`, and how many pipelines a replay
takes at once."""

cdef extern from *:
    """
    #define FORWARD 0
    #define WEIGHT 3
    #define LANES 8
    """
    enum:
        FORWARD
        WEIGHT
        LANES
