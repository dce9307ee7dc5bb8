"""A key that holds text gets what is written, in a file of the user's and on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf.compose import compose, compose_unchecked, config_text, read_experiment
from conf.errors import ConfigError
from conf.hydra_files import kind_of
from conf.reading.written_text import _required
from conf.schema.cluster import Gpu
from conf.schema.experiment import Experiment
from fasop.costs.profiles.files import read_profile
from launch.learning.plans import combinations

MISREAD = {
    "octal": r"0[0-7]{1,5}",
    "leading-zero": r"0[0-9]{1,5}",
    "underscores": r"[0-9]{1,4}(_[0-9]{2})+",
    "sexagesimal": r"[1-9][0-9]?:[0-5][0-9](:[0-5][0-9])?",
    "signed": r"[+-][0-9]{1,4}",
    "exponent": r"[1-9][0-9]?(\.[0-9])?[eE][+-]?[0-9]",
    "float": r"[0-9]{1,2}\.[0-9]{0,2}0",
    "hexadecimal": r"0x[0-9A-F]{1,4}",
    "binary": r"0b[01]{1,4}",
    "date": r"20[0-9]{2}-[01][0-9]-[0-3][0-9]",
    "switch": r"(yes|Yes|no|NO|on|off|OFF|true|True|TRUE|false|False|y|n|Y)",
    "infinite": r"(inf|Inf|nan|NaN|\.inf|-\.INF|\.nan)",
}
"""What YAML 1.1 or Hydra's grammar takes for a number, a switch or a date."""
SCALARS = st.one_of([st.from_regex(pattern, fullmatch=True) for pattern in MISREAD.values()])
ENTRY = "given"
GROUP = ("cluster", "groups", "gpu2")


def _texts(kind: Any, parts: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of all texts of the schema; dictionaries have one entry, and so have lists, called 0."""
    if kind is str:
        yield parts
    elif is_dataclass(kind):
        for name, hint in get_type_hints(kind).items():
            yield from _texts(_required(hint), (*parts, name))
    elif get_origin(kind) in (list, dict):
        yield from _texts(_required(get_args(kind)[-1]), (*parts, ENTRY if get_origin(kind) is dict else "0"))


KEYS = list(_texts(Experiment))
EXPERIMENT = "# @package _global_\ndefaults:\n  - _self_\n"


def _set(tree: dict[str, Any], parts: tuple[str, ...], text: str) -> None:
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
    tree[parts[-1]] = text


def _yaml(tree: dict[str, Any], indent: int) -> str:
    """With the texts as they are; entries 0 are those of lists."""
    space = "  " * indent
    lines = []
    for key, value in tree.items():
        start = f"{space}-" if key == "0" else f"{space}{key}:"
        lines.append(f"{start}\n{_yaml(value, indent + 1)}" if isinstance(value, dict) else f"{start} {value}\n")
    return "".join(lines)


def _at(config: Any, parts: tuple[str, ...]) -> Any:
    for part in parts:
        config = config[int(part) if part == "0" else part]
    return config


def test_the_schema_has_texts_of_every_shape() -> None:
    for key in ("name", "cluster.groups.given.account", "cluster.environment.given", "executor.hosts.0"):
        assert tuple(key.split(".")) in KEYS


@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(SCALARS, min_size=len(KEYS), max_size=len(KEYS)))
def test_every_text_of_a_file_is_what_is_written(tmp_path: Path, texts: list[str]) -> None:
    tree: dict[str, Any] = {}
    for parts, text in zip(KEYS, texts, strict=True):
        _set(tree, parts, text)
    (tmp_path / "experiment").mkdir(exist_ok=True)
    (tmp_path / "experiment" / "mine.yaml").write_text(EXPERIMENT + _yaml(tree, 0))
    composed = OmegaConf.to_container(compose_unchecked([f"--config-dir={tmp_path}", "experiment=mine"]))
    assert [_at(composed, parts) for parts in KEYS] == texts


@settings(deadline=None, max_examples=4)
@given(texts=st.lists(SCALARS, min_size=len(KEYS), max_size=len(KEYS)))
def test_every_text_of_a_word_is_what_is_written(texts: list[str]) -> None:
    known: dict[tuple[str, ...], tuple[str, ...]] = {
        ("cluster", "gpus", ENTRY): ("cluster", "gpus", "a10"),
        ("cluster", "groups", ENTRY): GROUP,
    }
    of_key = {
        (*known.get(parts[:3], parts[:3]), *parts[3:]): text
        for parts, text in zip(KEYS, texts, strict=True)
        if "0" not in parts
    }
    words = [f"++{'.'.join(parts)}={text}" for parts, text in of_key.items()]
    composed = OmegaConf.to_container(compose_unchecked(["cluster=a10x8", *words]))
    assert {parts: _at(composed, parts) for parts in of_key} == of_key


@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=SCALARS, first=SCALARS, second=SCALARS)
def test_a_run_that_goes_on_reads_the_same_texts(tmp_path: Path, name: str, first: str, second: str) -> None:
    name = name.lstrip("-.")
    hosts = f"cluster.environment_from=[{'A' + first.strip('+-.:').translate({46: 95, 45: 95, 43: 95, 58: 95})}]"
    written = compose([f"name={name}", f"++cluster.environment={{X: {first}, Y: {second}}}", hosts])
    assert (written.name, written.cluster.environment) == (name, {"X": first, "Y": second})
    path = tmp_path / "config.yaml"
    path.write_text(config_text(written))
    assert read_experiment(path) == written


@pytest.mark.parametrize("null", ["null", "~", "Null", ""])
def test_null_still_unsets_a_text(tmp_path: Path, null: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text(f"defaults:\n  - demo\nbest: {null}\n")
    assert compose([f"--config-dir={tmp_path}", "train=mine"]).train.best is None
    assert compose(["train.best=null"]).train.best is None


def test_a_text_that_must_be_set_asks_for_quotes_around_null() -> None:
    with pytest.raises(ConfigError, match="name=null: must have a value, not null; put"):
        compose(["name=null"])
    assert compose(["name='null'"]).name == "null"


def test_names_of_variables_and_groups_are_texts_too(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text(
        "defaults:\n  - local\n  - _self_\nenvironment:\n  ON: off\n  y: 010\n  NO: 1_0\nlinks:\n  010: {on: {}}\n"
    )
    cluster = compose_unchecked([f"--config-dir={tmp_path}", "cluster=mine"]).cluster
    assert dict(cluster.environment) == {"ON": "off", "y": "010", "NO": "1_0"}
    assert OmegaConf.to_container(cluster.links) == {"010": {"on": {}}}


def test_files_of_the_user_may_have_such_names(tmp_path: Path) -> None:
    for group, text in (("model", "defaults:\n  - tiny\n  - _self_\nname: 1e3\n"), ("experiment", EXPERIMENT)):
        (tmp_path / group).mkdir()
        (tmp_path / group / "2024_11.yaml").write_text(text)
    chosen = "# @package _global_\ndefaults:\n  - override /model: 2024_11\n  - _self_\nyes: true\n"
    (tmp_path / "experiment" / "007.yaml").write_text(chosen)
    assert compose([f"--config-dir={tmp_path}", "model=2024_11"]).model.name == "1e3"
    by_file = compose([f"--config-dir={tmp_path}", "experiment=007"])
    assert (by_file.model.name, by_file.yes) == ("1e3", True)


def test_aliases_and_merged_mappings_are_read_by_what_they_stand_for(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        EXPERIMENT + "train:\n  log_interval: &a 1_0\n  until: *a\nname: *a\n"
        "cluster:\n  environment: &e\n    A: off\n"
        "  groups:\n    local:\n      environment:\n        <<: *e\n        B: on\n"
    )
    composed = compose_unchecked([f"--config-dir={tmp_path}", "experiment=mine"])
    assert (composed.train.log_interval, composed.train.until, composed.name) == (10, "1_0", "1_0")
    assert dict(composed.cluster.groups.local.environment) == {"A": "off", "B": "on"}


@pytest.mark.parametrize(("written", "number"), [("010", 10), ("1_000", 1000), ("0x10", 16)])
def test_whole_numbers_are_decimal(tmp_path: Path, written: str, number: int) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text(f"defaults:\n  - demo\n  - _self_\nseed: {written}\n")
    assert compose([f"--config-dir={tmp_path}", "train=mine"]).train.seed == number
    if not written.startswith("0x"):
        assert compose([f"train.seed={written}"]).train.seed == number


def test_minutes_and_seconds_are_no_number(tmp_path: Path) -> None:
    (tmp_path / "executor").mkdir()
    (tmp_path / "executor" / "mine.yaml").write_text("time_min: 1:30\n")
    with pytest.raises(ConfigError, match="time_min: must be a whole number, not '1:30'"):
        compose([f"--config-dir={tmp_path}", "executor=mine"])


@pytest.mark.parametrize("word", ["name=1e3 ", "name= 1e3", "name=1e3\t", "name= 1e3  "])
def test_spaces_around_a_text_mean_nothing(word: str) -> None:
    assert compose([word]).name == "1e3"


@pytest.mark.parametrize("name", ["0123", "4xa100", "1g"])
def test_a_name_that_no_key_may_have_is_written_as_that_of_an_entry(tmp_path: Path, name: str) -> None:
    (tmp_path / "cluster").mkdir()
    shipped = Path("conf/cluster/a10x8.yaml").read_text()
    (tmp_path / "cluster" / "mine.yaml").write_text(shipped.replace("  gpu2:", f"  {name}:"))
    chosen = [f"--config-dir={tmp_path}", "cluster=mine"]
    with pytest.raises(ConfigError, match=f"begins with a digit, as {name} does; write '") as caught:
        compose_unchecked([*chosen, f"cluster.groups.{name}.account=00123"])
    proposed = str(caught.value).split("write '")[1].removesuffix("'")
    assert compose_unchecked([*chosen, proposed]).cluster.groups[name].account == "00123"


def test_a_sweep_varies_texts() -> None:
    words = [word for _, (word,) in combinations(["name=2024_11_26,007,1e3,True,plain"])]
    assert [compose([word]).name for word in words] == ["2024_11_26", "007", "1e3", "True", "plain"]
    words = [word for _, (word,) in combinations(["name=choice(1_0,on,2.50)"])]
    assert [compose([word]).name for word in words] == ["1_0", "on", "2.50"]


def test_the_class_of_a_file_follows_from_its_group_or_package() -> None:
    assert kind_of("gpu/mine", None) is Gpu
    assert kind_of("experiment/a/b", "_global_") is Experiment
    assert kind_of("cluster/mine", None) is get_type_hints(Experiment)["cluster"]
    assert kind_of("gpu/mine", "cluster.gpus.a10") is Gpu
    assert kind_of("config", None) is Experiment


def test_a_profile_has_texts(tmp_path: Path) -> None:
    shipped = next(Path("fasop/profiles").glob("a10.yaml")).read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(shipped.replace("gpu: ", "gpu: 007 # ", 1))
    assert "007" in vars(read_profile(str(path))).values()
