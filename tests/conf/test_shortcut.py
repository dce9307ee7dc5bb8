"""The tests' shortcut through composing gives what Hydra gives."""

from __future__ import annotations

import pytest

from conf.compose import compose_unchecked
from conf.errors import ConfigError
from tests.support import composing

GIVEN = {
    "nothing": [],
    "values": ["train.lr=1e-3", "parallel.partition=null", "name='a b'", "+cluster.environment.A=1", "runs_dir=/x y"],
    "groups": ["cluster=a100x1_a10x7", "+gpu@cluster.gpus.cpu=cpu", "model=tiny", "cluster.groups.hgx.gpu=cpu"],
    "an experiment": ["experiment=seed_a100x1_a10x7", "container=none", "train.precision=fp16", "train.precision=bf16"],
    "a list": ["cluster.environment_from=[A,B]", "++train.seed=3"],
}
REFUSED = {
    "no such key": ["train.nothing=1"],
    "no such choice": ["model=nothing"],
    "no such group": ["modle=tiny"],
    "not a number": ["train.lr=much"],
    "a sweep": ["train.lr=1,2"],
    "no value": ["train.lr"],
    "Hydra's own": ["hydra.run.dir=/x"],
    "there already": ["+train.lr=1"],
    "no deletion": ["~cluster.groups.local.gpu"],
    "unclosed": ["name='a"],
}


@pytest.mark.parametrize("words", GIVEN.values(), ids=GIVEN)
def test_the_configuration_is_the_same(words: list[str]) -> None:
    for _ in range(2):
        assert composing.composed(words) == composing.COMPOSED(words)


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_has_the_same_message(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for way in (composing.composed, composing.COMPOSED):
        monkeypatch.setattr("conf.compose._composed", way)
        with pytest.raises(ConfigError) as caught:
            compose_unchecked(words)
        told.append(str(caught.value))
    assert told[0] == told[1]
