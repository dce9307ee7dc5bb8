"""Several threads of one process may compose at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from conf.compose import compose


def test_threads_that_compose_at_the_same_time_get_what_each_asked_for() -> None:
    rates = [0.001 * number for number in range(1, 7)]
    with ThreadPoolExecutor(len(rates)) as pool:
        found = list(pool.map(lambda rate: compose([f"train.lr={rate}"]).train.lr, rates))
    assert found == rates
