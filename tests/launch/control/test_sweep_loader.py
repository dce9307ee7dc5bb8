"""A sweep merges the files of a choice of groups once; each combination is what Hydra alone would compose."""

from __future__ import annotations

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from conf.hydra_files import hydra_session, register
from launch.sweep.hydra_sweep import SweepLoader

COMBINATIONS = [
    ["train.lr=1e-3", "parallel.partition=2-2"],
    ["train.lr=2e-3", "model=small", "parallel.partition=null"],
    ["parallel.partition=2-2", "model=small", "train.lr=2e-3"],
    ["experiment=seed_a10x8", "name=${model.name}-2", "+cluster.environment.X=1", "cluster.groups.gpu2.count=4"],
    ["hydra.job.name=mine", "hydra/job_logging=disabled", "executor.hosts=[a:2,b:2]"],
    ["train.lr=3e-3", "name='2024_11_26'"],
]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("overrides", COMBINATIONS, ids=" ".join)
def test_a_combination_is_what_hydra_composes(overrides: list[str]) -> None:
    with hydra_session():
        hydras = GlobalHydra.instance().config_loader()
        master = hydras.load_configuration("config", ["train.lr=1e-3,2e-3"], RunMode.MULTIRUN)
        ours = SweepLoader(hydras)
        for before in (
            [],
            ["train.lr=7", "name=other"],
            overrides,
        ):  # what earlier combinations leave behind is not seen
            ours.combination(master, before)
        assert OmegaConf.to_yaml(ours.combination(master, overrides)) == OmegaConf.to_yaml(
            hydras.load_sweep_config(master, overrides)
        )


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("wrong", ["train.lrr=1", "model=none_such", "+train.lr=3", "train.iterations=[1,2]"])
def test_what_cannot_be_composed_gets_hydras_message(wrong: str) -> None:
    with hydra_session():
        hydras = GlobalHydra.instance().config_loader()
        master = hydras.load_configuration("config", [], RunMode.MULTIRUN)
        messages = []
        for compose in (SweepLoader(hydras).combination, hydras.load_sweep_config):
            with pytest.raises(HydraException) as caught:
                compose(master, [wrong])
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.mark.usefixtures("registered")
def test_files_are_merged_once_for_each_choice_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    whole = ConfigLoaderImpl._load_configuration_impl

    def counted(*args: object, **given: object) -> object:
        read.append(given["overrides"])
        return whole(*args, **given)

    with hydra_session():
        hydras = GlobalHydra.instance().config_loader()
        master = hydras.load_configuration("config", [], RunMode.MULTIRUN)
        ours = SweepLoader(hydras)
        monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
        for model in ("tiny", "small"):
            for rate in range(1, 20):
                combination = [f"model={model}", f"train.lr={rate}"]
                ours.load_sweep_config(master, combination)  # as a sweeper does beforehand
                ours.combination(master, combination)
    assert read == [["model=tiny"], ["model=small"]]


@pytest.fixture
def registered() -> None:
    register()
