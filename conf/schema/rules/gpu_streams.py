"""What goes with several copies of the model on a GPU: `parallel.streams` and `adapt.streams`."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.schema.adapt import Adapt
from conf.schema.engine import Engine, EngineKind
from conf.schema.parallel import Parallel, check_data_parallel
from conf.schema.train import Train


def check(parallel: Parallel, adapt: Adapt, train: Train, engine: Engine) -> None:
    """Whether plan, training and engine go with several streams on a GPU, where the plan or its adaptation has them."""
    streams, none = f"parallel.streams={parallel.streams}", "parallel.streams=null"
    if max(parallel.streams_of) == 1:
        if not adapt.streams:
            return
        streams, none = f"adapt.streams={adapt.streams}", "adapt.streams=[]"
        check_data_parallel(parallel, streams, none)
    for key, value, allowed in (
        ("train.compile", str(train.compile).lower(), "false"),
        ("engine.kind", str(engine.kind), str(EngineKind.tdpp)),
    ):
        if value != allowed:
            raise ConfigError(f"{streams} cannot be combined with {key}={value}; use {key}={allowed}, or {none}")
