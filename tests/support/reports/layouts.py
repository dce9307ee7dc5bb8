"""Small real runs of the engine, one of each kind of layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.megatron_ext.engine_run import make_corpus, make_run

STREAMED = ("parallel.schedule=pipedream", "model.untie_embeddings_and_output_weights=true")


@dataclass(frozen=True)
class Layout:
    """What a run is made of."""

    stages: int
    ranks: int
    overrides: tuple[str, ...]
    streams: bool = False


LAYOUTS = {
    "1f1b": Layout(2, 4, ("parallel.pipeline=2", "parallel.data=2")),
    "interleaved": Layout(
        2, 2, ("parallel.pipeline=2", "parallel.data=1", "parallel.schedule=interleaved", "parallel.chunks=2")
    ),
    "zb-h1": Layout(3, 3, ("parallel.pipeline=3", "parallel.data=1", "parallel.schedule=zb_h1")),
    "pipedream": Layout(3, 3, ("parallel.pipeline=3", "parallel.data=1", *STREAMED), streams=True),
    "pipedream-2-1": Layout(
        2, 3, ("parallel.pipeline=2", "parallel.data=1", "parallel.replicas=2-1", *STREAMED), streams=True
    ),
    "data-parallel": Layout(1, 2, ("parallel.pipeline=1", "parallel.data=2")),
}


@cache
def run_of(name: str, folder: Path) -> Path:
    """Trains for some iterations in a folder below `folder`; the run's folder."""
    place = folder / name
    place.mkdir(parents=True)
    sizes = ("model.layers=4", "parallel.micro_batch_size=1", "train.iterations=6", "train.checkpoint=false")
    made = make_run(place / "runs/tiny/20260101-000000-aaaa", make_corpus(place), *sizes, *LAYOUTS[name].overrides)
    assert made.go() == 0, made.stderr()
    made.run.config.touch()
    return made.run.path
