"""A configuration from the cache is the one that Hydra would compose now."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from conf import composition_cache, hydra_files
from conf.compose import compose, compose_parts, compose_unchecked, to_object
from conf.errors import ConfigError
from conf.origins import SEARCHED, defaults_taken
from conf.plain import Plain
from conf.reading.user_files import choices
from conf.schema.parallel import Parallel
from conf.schema.train import Train
from fasop.costs.profiles.files import read_profile
from fasop.search.inputs import PARTS
from tests.support import ROOT
from tests.support.composing import COMPOSED

SEED = ("experiment=seed_a100x1_a10x7", "train.precision=fp16", "train.name=007")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tdpp" / "composed"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configurations of one's own, with a model `mine` of 8 layers."""
    folder = tmp_path / "own"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text("defaults:\n  - tiny\n  - _self_\nlayers: 8\n")
    monkeypatch.setenv("TDPP_CONFIG", str(folder))
    return folder


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the configs that Hydra composes."""
    seen: list[str] = []
    by_hydra = hydra_files.composed
    monkeypatch.setattr(hydra_files, "composed", lambda name, words: seen.append(name) or by_hydra(name, words))
    return seen


def layers(*words: str) -> int:
    found: int = COMPOSED(["model=mine", *words]).model.layers
    return found


@pytest.mark.parametrize(
    "words",
    [SEED[:2], [], ["cluster=two_rooms"], ["experiment=vit_jabas", "model=llama-70b"]],
    ids=lambda words: " ".join(words) or "demo",
)
def test_what_is_kept_equals_what_hydra_composes(composed: list[str], words: Sequence[str]):
    first, second = COMPOSED(words), COMPOSED(words)
    assert composed == ["config"]
    assert first == second
    assert [*composition_cache._nodes(first)] == [*composition_cache._nodes(second)]


def test_nothing_that_is_done_with_a_configuration_reaches_the_cache():
    COMPOSED(["model=tiny"]).model.layers = 99
    assert COMPOSED(["model=tiny"]).model.layers != 99


def test_a_kept_configuration_is_read_without_hydra():
    script = (
        "import sys; from conf.compose import compose_unchecked; from conf.origins import SEARCHED, defaults_taken; "
        f"words = {SEED[:2]!r}; defaults_taken(words, compose_unchecked(words), SEARCHED); "
        "print(*[name for name in ('hydra', 'antlr4.Lexer') if name in sys.modules])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert "hydra" in runs[0]
    assert "hydra" not in runs[1]


def test_defaults_that_nobody_chose_are_kept_too(composed: list[str]):
    words = ["cluster=a10x8"]
    config = compose_unchecked(words)
    first = defaults_taken(words, config, SEARCHED)
    composed.clear()
    assert defaults_taken(words, config, SEARCHED) == first
    assert composed == []


@pytest.mark.parametrize(
    ("change", "layers_then"),
    [
        (lambda own: (own / "model" / "mine.yaml").write_text("defaults:\n  - tiny\n  - _self_\nlayers: 9\n"), 9),
        (lambda own: (own / "model" / "theirs.yaml").write_text("layers: 9\n"), 8),
    ],
    ids=["same size", "another file"],
)
def test_an_edited_file_counts_at_once(own: Path, change: Callable[[Path], object], layers_then: int):
    assert layers() == 8
    file = own / "model" / "mine.yaml"
    before = file.stat()
    change(own)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert layers() == layers_then


def test_a_file_that_comes_to_lie_in_an_earlier_folder_counts(own: Path, tmp_path: Path):
    earlier = tmp_path / "earlier"
    (earlier / "model").mkdir(parents=True)
    assert layers("--config-dir", str(earlier)) == 8
    (earlier / "model" / "mine.yaml").write_text("defaults:\n  - tiny\n  - _self_\nlayers: 5\n")
    assert layers("--config-dir", str(earlier)) == 5


def test_a_folder_that_is_gone_counts(own: Path):
    assert layers() == 8
    (own / "model" / "mine.yaml").unlink()
    with pytest.raises(Exception, match="mine"):
        layers()


def test_what_the_environment_chooses_is_not_kept(own: Path, monkeypatch: pytest.MonkeyPatch, cache: Path):
    (own / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /model: ${oc.env:BASE}\n"
    (own / "experiment" / "mine.yaml").write_text(text)
    for base in ("tiny", "small"):
        monkeypatch.setenv("BASE", base)
        assert COMPOSED(["experiment=mine"]).model.name == base
    assert not cache.exists()


def test_a_file_given_by_its_path_is_read_each_time(own: Path, cache: Path):
    file = own.parent / "given.yaml"
    for number in (3, 4):
        file.write_text(f"defaults:\n  - tiny\n  - _self_\nlayers: {number}\n")
        assert COMPOSED([f"model={file}"]).model.layers == number
    assert not cache.exists()


def test_texts_that_hydra_would_misread_stay_texts():
    assert [compose(["name=007"]).name for _ in range(2)] == ["007", "007"]


@pytest.mark.parametrize("content", [b"", b"x", b"{}", b"[" * 200_000], ids=["empty", "cut", "other", "deep"])
def test_a_damaged_entry_is_made_again(cache: Path, composed: list[str], content: bytes):
    first = COMPOSED(SEED[:1])
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    assert COMPOSED(SEED[:1]) == first
    COMPOSED(SEED[:1])
    assert composed == ["config"] * 2


def test_without_a_place_for_the_cache_hydra_composes_each_time(tmp_path: Path, composed: list[str]):
    (tmp_path / "cache").write_text("a file where the folder would be")
    for _ in range(2):
        COMPOSED(SEED[:1])
    assert composed == ["config"] * 2


def test_the_cache_has_an_end(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(composition_cache, "_MOST_ENTRIES", 4)
    for seed in range(7):
        COMPOSED([f"train.seed={seed}"])
    assert 0 < len([*cache.iterdir()]) <= 4


@pytest.mark.parametrize("experiment", [name for name in choices("experiment", ()) if "/" not in name])
def test_plain_values_make_the_objects_that_omegaconf_makes(experiment: str):
    words = [f"experiment={experiment}", "parallel.partition=null"]
    composed = compose_unchecked(words)
    plain = compose_parts(words, PARTS)
    model = COMPOSED(words).model
    lacking = any(OmegaConf.is_missing(model, key) for key in model)
    assert isinstance(plain, DictConfig if lacking else Plain)
    for part in PARTS:
        kind = OmegaConf.get_type(composed, part)
        assert to_object(plain, kind, part) == to_object(composed, kind, part)


def test_plain_values_keep_the_rules_and_one_length_of_the_training():
    words = ["experiment=seed_a10x8", "train.samples=640"]
    for _ in range(2):
        train = to_object(compose_parts(words, PARTS), Train, "train")
        assert (train.samples, train.iterations) == (640, None)
        for more in (["train.iterations=7"], ["parallel.micro_batch_size=0"]):
            with pytest.raises(ConfigError, match=r"train.iterations=7|micro_batch_size=0 must be"):
                to_object(compose_parts([*words, *more], PARTS), Parallel, "parallel")


def test_a_search_that_was_composed_before_imports_no_omegaconf():
    script = (
        "import sys; from launch.commands import search; "
        "search.main(['experiment=seed_a10x8', 'parallel.schedule=one_f_one_b', 'leave_out=false', 'by_stage=false']); "
        "print(*[name for name in ('hydra', 'omegaconf', 'yaml') if name in sys.modules])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    *table, imported = runs[0].splitlines()
    assert imported == "hydra omegaconf yaml"
    assert runs[1].splitlines() == [*table, ""]


def test_a_profile_is_kept_by_its_content(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "mine.yaml"
    text = (ROOT / "fasop" / "profiles" / "a10.yaml").read_text()
    file.write_text(text)
    first = read_profile(str(file))
    assert len([*cache.iterdir()]) == 1
    monkeypatch.setattr("conf.reading.yaml_file.load_yaml", None)
    assert read_profile(str(file)) == first
    monkeypatch.undo()
    file.write_text(text.replace("hidden: 1600", "hidden: 3200"))
    assert read_profile(str(file)) != first
    file.write_text("models: [")
    with pytest.raises(ConfigError, match=r"mine.yaml.*not YAML"):
        read_profile(str(file))


def test_a_profile_with_values_of_the_environment_is_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "mine.yaml"
    text = (ROOT / "fasop" / "profiles" / "a10.yaml").read_text()
    file.write_text(
        "\n".join("source: ${oc.env:HERE}" if line.startswith("source:") else line for line in text.splitlines())
    )
    for value in ("one", "two"):
        monkeypatch.setenv("HERE", value)
        assert read_profile(str(file)).source == value
