"""Many partitions replayed at once take what each takes by itself, rank by rank."""

from __future__ import annotations

import numpy as np
import pytest

from fasop.simulation.iteration import iteration
from fasop.simulation.ranks import columns
from fasop.simulation.ranks.columns import ColumnReplay, lists_of
from fasop.simulation.ranks.heterogeneous_stages import RankColumns
from megatron_ext.contract.layout import Layout
from tests.support.cases import fewer


def random_columns(rng: np.random.Generator, embedding: float) -> RankColumns:
    partitions = 11

    def some(*shape: int) -> np.ndarray:
        return rng.uniform(0, 1, (*shape, partitions))

    hop, back = some(), some()
    return RankColumns(
        forward=some(1),
        backward=2 * some(1),
        send_forward=hop,
        send_backward=back,
        busy_forward=hop * rng.uniform(0, 1),
        busy_backward=back * rng.uniform(0, 1),
        one_way_out=bool(rng.integers(2)),
        gradients=some(),
        embedding=embedding,
        optimizer=some(),
        weights=0 * some(),
    )


@pytest.mark.parametrize("seed", range(fewer(24, 60)))
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "numpy"])
def test_columns_take_what_ranks_do(seed: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(columns, "compiled", None)
        columns._ordered.cache_clear()
    elif columns.compiled is None:
        pytest.skip("tdpp was installed without a C compiler")
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(2, 5))
    even, alike, name = rng.random() < 0.4, rng.random() < 0.4, str(rng.choice(["gpipe", "one_f_one_b", "zb_h1"]))
    tensors = tuple(rng.choice([1, 2, 4], stages).tolist())
    replicas = tuple(rng.integers(1, 4, stages).tolist())
    layout = Layout((tensors[0],) * stages if alike else tensors, (replicas[0],) * stages if even else replicas)
    counts = rng.integers(1, 6, layout.replicas[0]).tolist() if layout.even else [int(rng.integers(4, 10))]
    of_groups = {
        (stage, replica): random_columns(rng, float(rng.uniform()) if stage in (0, stages - 1) else 0.0)
        for stage, of_stage in enumerate(layout.replicas)
        for replica in range(of_stage)
    }
    ranks = [of_groups[layout.stage_dp_tp(rank)[:2]] for rank in range(layout.world_size)]
    replay = ColumnReplay(layout, name, counts)
    taken = replay.seconds(ranks)
    actions = lists_of(layout, name, counts)
    alone = [iteration(layout, actions, [one.of(column) for one in ranks]).seconds for column in range(11)]
    assert taken.tolist() == pytest.approx(alone, rel=1e-12)
    layers = rng.integers(11, size=(stages, 13))
    places = [layout.stage_dp_tp(rank)[0] for rank in range(layout.world_size)]
    mixed = [
        iteration(layout, actions, [one.of(some[stage]) for stage, one in zip(places, ranks, strict=True)]).seconds
        for some in layers.T
    ]
    assert replay.of_layers(replay.tables(ranks), layers).tolist() == pytest.approx(mixed, rel=1e-12)
