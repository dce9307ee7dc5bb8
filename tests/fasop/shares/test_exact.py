"""Solutions against all there are, by the public performance model, and at the size of a large cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from fasop.errors import SearchError
from fasop.shares.performance import WeightSync, paces
from fasop.shares.public_files import Cluster, read_cluster
from fasop.shares.solution import best
from tests.support.fasop import quickstart

PUBLIC_S = [
    *(0.171076, 0.209392, 0.300329, 0.32049, 0.384531, 0.465379, 0.521521, 0.567128, 0.5961),
    *(0.72508, 0.746552, 0.804785, 0.849807, 0.905161, 0.970538, 1.12164, 1.103791, 1.12164),
    *(1.17281, 1.335758, 1.344943, 1.351111, 1.398877, 1.46103, 1.520345, 1.676127, 1.674024),
    *(1.755349, 1.757617, 1.946436, 1.818269, 1.948763, 2.072204, 2.112256, 2.12869, 2.224507),
    *(2.175508, 2.224507, 2.326231, 2.557115, 2.492829, 2.498241, 2.532747, 2.700739, 2.664289),
    *(2.964233, 2.772981, 3.022768, 2.889986, 3.022768, 2.907981, 3.04772, 3.104071, 3.253974),
    *(3.307744, 3.247225, 3.329361, 3.656477, 3.479652, 3.778471, 3.634547, 3.597198, 3.604464),
]  # fmt: skip
"""What the public solver answers on its quickstart, by global batches from 256 to 8,192 in steps of 128."""


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return read_cluster(quickstart.write(tmp_path_factory.mktemp("quickstart")))


def random_cluster(public: Cluster, random: Random) -> Cluster:
    """One to three servers of up to four GPUs, whose memory, times and links are unlike."""
    kinds = {server.gpu: server for server in public.servers}
    servers = tuple(
        replace(random.choice([*kinds.values()]), name=f"n{number}", gpus=random.choice((1, 2, 2, 4)))
        for number in range(random.choice((1, 2, 2, 3)))
    )
    sizes = random.sample([*public.measured], random.choice((1, 2, 3)))
    measured = {}
    for size in sizes:
        measured[size] = {
            gpu: replace(
                one,
                most_workers=random.randint(1, one.most_workers),
                steps=tuple(
                    replace(
                        step,
                        forward_s=step.forward_s * random.uniform(0.7, 1.4),
                        update_s=step.update_s * random.uniform(0.2, 9),
                    )
                    for step in one.steps
                ),
            )
            for gpu, one in public.measured[size].items()
        }
    buckets = tuple(random.uniform(1, 60) for _ in range(random.randint(1, 4)))
    return replace(public, servers=servers, measured=measured, buckets_mib=buckets)


def least(cluster: Cluster, batch: int, sync: WeightSync, unit: int) -> float:
    """Of all local batch sizes, workers and passes: tried one by one."""
    found = float("inf")
    for size in cluster.measured:
        if batch % (size * unit):
            continue
        total = batch // (size * unit)
        units = [
            {
                number: min(
                    pace.seconds(number // workers - 1)
                    for workers, pace in enumerate(paces(cluster, server, size, sync), 1)
                    if number % workers == 0
                )
                for number in range(1, total + 1)
            }
            for server in cluster.servers
            for _ in range(server.gpus // unit)
        ]
        *first, last = units
        for numbers in product(*first):
            if (rest := total - sum(numbers)) in last:
                seconds = [of[number] for of, number in zip(first, numbers, strict=True)]
                found = min(found, max([*seconds, last[rest]]))
    return found


@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_clusters_have_no_better_solution(public: Cluster, part: int) -> None:
    random, solved = Random(part), 0
    for _ in range(100):
        cluster = random_cluster(public, random)
        unit = random.choice([size for size in (1, 2, 4) if all(one.gpus % size == 0 for one in cluster.servers)])
        while sum(one.gpus for one in cluster.servers) // unit > 5:
            unit *= 2
            if any(one.gpus % unit for one in cluster.servers):
                cluster = replace(cluster, servers=cluster.servers[:1])
                unit = 1
        units = sum(one.gpus for one in cluster.servers) // unit
        size = random.choice([*cluster.measured])
        batch = size * unit * random.randint(units, {1: 40, 2: 30, 3: 16, 4: 12, 5: 9}[units])
        sync = random.choice([*WeightSync])
        try:
            found = best(cluster, batch, sync, unit=unit).seconds
        except SearchError:
            continue  # memory that was not timed
        solved += 1
        assert found == least(cluster, batch, sync, unit)
    assert solved > 80


def test_never_worse_than_the_public_solver(public: Cluster) -> None:
    ours = [best(public, batch, WeightSync.overlap).seconds for batch in range(256, 8193, 128)]
    ratios = [theirs / seconds for theirs, seconds in zip(PUBLIC_S, ours, strict=True)]
    assert min(ratios) > 1 - 1e-5
    assert sum(ratio > 1 + 1e-5 for ratio in ratios) == 13
    assert max(ratios) == pytest.approx(1.0705, abs=1e-4)


def test_512_gpus_are_solved_exactly(public: Cluster) -> None:
    servers = [public.servers[number % 2] for number in range(128)]
    cluster = replace(public, servers=tuple(replace(one, name=f"n{number}") for number, one in enumerate(servers)))
    found = best(cluster, 131_072, WeightSync.overlap)
    assert sum(share.micro_batches * share.gpus for share in found.shares) * found.local_batch_size == 131_072
    assert found.seconds == pytest.approx(0.97081, abs=1e-5)
