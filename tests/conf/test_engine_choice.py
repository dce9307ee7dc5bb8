"""`engine=auto` takes the engine that can run the plan, and says why."""

from __future__ import annotations

import pytest

from conf import engine_choice
from conf.compose import compose, compose_unchecked
from conf.engine_choice import CORE, LAYERS
from conf.errors import ConfigError
from conf.schema.engine import EngineKind
from launch.commands.launching.resolve_auto import resolve_auto

ON_GPUS = ("experiment=seed_a10x8", "container=none")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """This Python has what a test says, and by default megatron-core without Transformer Engine."""
    modules = getattr(request, "param", {CORE})
    monkeypatch.setattr(engine_choice, "_installed", modules.__contains__)


def chosen(*words: str) -> tuple[EngineKind, str]:
    experiment, why = resolve_auto(compose_unchecked([*words, "engine=auto"]))
    assert why is not None
    return experiment.engine.kind, why


@pytest.mark.parametrize(
    ("words", "engine", "why"),
    [
        pytest.param(("experiment=demo",), EngineKind.tdpp, "slower on CPUs", id="cpus"),
        pytest.param(ON_GPUS, EngineKind.tdpp, "Transformer Engine is not installed here", id="without-kernels"),
        pytest.param(("experiment=seed_a10x8",), EngineKind.tdpp, "container has is not known", id="container"),
        pytest.param((*ON_GPUS, "parallel.shares=13-17*3"), EngineKind.tdpp, "parallel.shares=13-17*3", id="shares"),
        pytest.param(("experiment=demo", "model=bert-tiny"), EngineKind.tdpp, "model.family=bert", id="bert"),
        pytest.param(("model=mixtral-tiny",), EngineKind.megatron_core, "model.experts=4", id="experts"),
        pytest.param(
            ("experiment=demo", "+engine.options.moe_z_loss_coeff=0.1"),
            EngineKind.megatron_core,
            "engine.options.moe_z_loss_coeff",
            id="options",
        ),
    ],
)
def test_the_engine_that_can_run_the_plan_is_taken(words: tuple[str, ...], engine: EngineKind, why: str) -> None:
    kind, said = chosen(*words)
    assert kind is engine
    assert said.startswith(f"engine=auto takes {engine}: ")
    assert why in said
    assert compose([*words, "engine=auto"]).engine.kind is engine


@pytest.mark.parametrize("installed", [{CORE, LAYERS}], indirect=True)
def test_megatron_core_is_taken_where_its_kernels_are() -> None:
    assert chosen(*ON_GPUS)[0] is EngineKind.megatron_core
    assert chosen(*ON_GPUS, "parallel.shares=13-17*3")[0] is EngineKind.tdpp
    assert chosen(*ON_GPUS, "model=bert-base", "parallel.partition=null")[0] is EngineKind.tdpp


@pytest.mark.parametrize("installed", [set()], indirect=True)
def test_an_engine_that_is_not_installed_is_said_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"model\.experts=4 .* megatron-core is not installed here: install tdpp"):
        chosen("model=mixtral-tiny")


def test_a_plan_that_no_engine_runs_is_refused_with_both_reasons() -> None:
    with pytest.raises(ConfigError, match=r"no engine can run this: engine=tdpp: model\.experts.*parallel\.replicas="):
        chosen("model=mixtral-tiny", "parallel.replicas=1-2")


def test_a_fault_of_the_plan_itself_is_said_once() -> None:
    with pytest.raises(ConfigError) as error:
        chosen("experiment=demo", "parallel.partition=1-9")
    assert str(error.value).startswith("parallel.partition=1-9 has")
