"""What all loops share: kinds of passes, numbered as in `fasop.simulation.steps.Pass`, how many pipelines a replay takes
at once, and vectors of their times."""

cdef extern from *:
    """
    #define FORWARD 0
    #define WEIGHT 3
    #define LANES 8
    /* Compilers do not turn a loop with a maximum into vector instructions by themselves, and each processor is the
       fastest with the widest vectors that it has. */
    #define VECTORS(NAME, WIDTH, TARGET) \
    typedef double NAME##_some __attribute__((vector_size(8 * WIDTH), aligned(8), may_alias)); \
    typedef long long NAME##_mask __attribute__((vector_size(8 * WIDTH))); \
    TARGET static inline NAME##_some NAME##_later(NAME##_some one, NAME##_some other) { \
        NAME##_mask later = other > one; \
        return (NAME##_some)((later & (NAME##_mask)other) | (~later & (NAME##_mask)one)); \
    }
    #ifdef __x86_64__
    #define OF_EACH_WIDTH(LOOPS) \
    LOOPS(by_2, 2, ) \
    LOOPS(by_4, 4, __attribute__((target("avx2")))) \
    LOOPS(by_8, 8, __attribute__((target("avx512f"))))
    #define WIDEST(LOOP) (__builtin_cpu_supports("avx512f") ? by_8##LOOP : \
                          __builtin_cpu_supports("avx2") ? by_4##LOOP : by_2##LOOP)
    #else
    #define OF_EACH_WIDTH(LOOPS) LOOPS(by_2, 2, )
    #define WIDEST(LOOP) by_2##LOOP
    #endif
    """
    enum:
        FORWARD
        WEIGHT
        LANES
