"""The variables of a cluster: names that hold, and secrets by their names alone."""

from __future__ import annotations

import re

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.visible import without_passwords


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "db_password", "MY_APIKEY", "SSH_PRIVATE_KEY"],
)
@pytest.mark.parametrize("owner", ["cluster", "cluster.groups.local"])
def test_a_secret_is_refused_with_the_way_to_pass_it_on(name: str, owner: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{owner}.environment.{name}: .*cluster.environment_from=\[{name}\]"
    ) as told:
        compose([f"+{owner}.environment.{name}=hunter2"])
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("url", ["https://bob:hunter2@mlflow.example:5000/x", "postgresql://bob:hunt@er2@db/mlflow"])
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI: .*it has a password; export MLFLOW_TRACK") as told:
        compose([f"+cluster.environment.MLFLOW_TRACKING_URI='{url}'"])
    assert "hunt" not in str(told.value)
    assert without_passwords(f"see {url}, or http://a:b@c").count("***@") == 2
    assert "hunt" not in without_passwords(url)


@pytest.mark.parametrize("value", ["http://proxy.example:3128", "tcp://10.0.0.1:29500", "a@b:c"])
def test_a_url_without_a_password_is_given(value: str) -> None:
    assert compose([f"+cluster.environment.PROXY='{value}'"]).cluster.environment["PROXY"] == value


@pytest.mark.parametrize(
    "name", ["NCCL_IB_HCA", "TOKENIZERS_PARALLELISM", "PASSES", "SSH_AUTH_SOCK", "KEYBOARD", "MONKEY"]
)
def test_what_only_sounds_like_a_secret_is_not_refused(name: str) -> None:
    assert compose([f"+cluster.environment.{name}=x"]).cluster.environment[name] == "x"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "+cluster.environment.TDPP_RUN_TOKEN=x",
            "cluster.environment.TDPP_RUN_TOKEN: tdpp sets TDPP_RUN_TOKEN itself",
        ),
        ("cluster.environment_from=[NODE_RANK]", "cluster.environment_from: tdpp sets NODE_RANK itself"),
        ("+cluster.environment.A-B=x", "'A-B' is not a variable name"),
        ("cluster.environment_from=['A=1']", "cluster.environment_from: 'A=1' is not a variable name"),
    ],
)
def test_a_variable_that_cannot_be_given_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose([override])


def test_a_variable_has_one_source() -> None:
    with pytest.raises(ConfigError, match=r"cluster.environment_from names A, which cluster.environment also sets"):
        compose(["+cluster.environment.A=1", "cluster.environment_from=[A]"])
