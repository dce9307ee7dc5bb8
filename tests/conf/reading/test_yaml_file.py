"""Files of others cost no memory, no time and no secrets."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from conf.compose import compose, config_text, read_experiment
from conf.errors import ConfigError
from conf.reading.yaml_file import load_yaml

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(BOMB, "with its aliases .* expanded it has more than 200000 values", id="alias-bomb"),
        pytest.param("a: " + "[" * 60 + "]" * 60, "mappings and lists are nested more than 50", id="deep"),
        pytest.param(
            "a: " + "[" * 100_000 + "]" * 100_000, "mappings and lists are nested more than 50", id="very-deep"
        ),
        pytest.param(
            "a: [?]\nb: " + "[" * 9000,
            "mappings and lists are nested more than 50",
            id="deep-behind-a-fault-of-libyaml",
        ),
        pytest.param("a: &a [*a]\n", "more than 200000 values", id="within-itself"),
        pytest.param("a: " + "9" * 5000, "a value cannot be read: a whole number has too many digits", id="digits"),
        pytest.param("a: " + "x" * 2**24, "bytes; a configuration has at most", id="long"),
    ],
)
def test_a_file_that_would_fill_the_memory_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(ConfigError, match=message):
        load_yaml(path)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 5
    assert after.ru_maxrss - before.ru_maxrss < 300 * 2**10


def test_aliases_within_reason_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {b: 1}\nc: *a\n")
    assert load_yaml(path).c.b == 1


@pytest.mark.parametrize("key", ["name: demo", "prefix: "])
def test_a_frozen_configuration_reads_nobodys_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("MY_SECRET", "precious")
    text = config_text(compose(["experiment=demo"]))
    assert key in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(key, key.split(":")[0] + ": ${oc.env:MY_SECRET} #", 1))
    with pytest.raises(
        ConfigError, match=r"refers to another key \(\$\{…\}\), which no file written by tdpp does"
    ) as told:
        read_experiment(path)
    assert "precious" not in str(told.value)


def test_what_only_looks_like_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    experiment = compose(["experiment=demo", r"data.prefix='a\${oc.env:HOME}b'"])
    path = tmp_path / "config.yaml"
    path.write_text(config_text(experiment))
    assert read_experiment(path) == experiment
    assert "${oc.env:HOME}" in experiment.data.prefix


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("model: 5", "model=5 must be a group of keys"),
        ("profile: [1, 1]", r"profile=\[1, 1\] must be a group of keys"),
        ("train: {seed: many}", "train.seed: must be a whole number, not 'many'"),
        ("cluster: {groups: 3}", "cluster.groups: must be a group of keys"),
        ("cluster: {groups: {a: 3}}", "cluster.groups.a: must be a group of keys, not '3'"),
        ("parallel: {tensr: 3}", "parallel.tensr"),
        ("model:", "model=None must be a group of keys"),
        ("true", "the file has no keys"),
        ("[]", "the file has no keys"),
    ],
    ids=["number", "list", "text", "groups", "group", "unknown", "null", "truth", "no object"],
)
def test_a_frozen_configuration_of_wrong_types_is_one_message_with_its_file(
    tmp_path: Path, content: str, why: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"^{path}: {why}"):
        read_experiment(path)
