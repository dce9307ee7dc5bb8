"""Whatever is wrong with the words or files of a configuration is one line that says where, and what would be right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.compose import command_line, compose
from conf.errors import ConfigError
from conf.reading.own_folders import groups
from tests.support.cases import each, fewer

EVERY = "'tdpp launch --cfg job' prints every key"
MODEL = "name: mine\nlayers: 4\nhidden: 64\nheads: 4\nsequence_length: 64\nvocab_size: 256\n"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("modle=tiny", "modle is not a key; did you mean model"),
        ("modle.layers=3", "modle.layers is not a key; did you mean model.layers"),
        ("model.layer=3", "model.layer is not a key; did you mean model.layers"),
        ("++model.layer=3", "model.layer is not a key; did you mean model.layers"),
        ("~model.layer", "~model.layer: model.layer is not a key; did you mean model.layers"),
        ("layers=3", "layers is not a key; did you mean model.layers"),
        ("model.micro_batch_size=3", "is not a key; did you mean parallel.micro_batch_size"),
        ("itertions=3", "did you mean train.iterations, train.eval_iterations"),
        ("xyzzy=3", "xyzzy is not a key; the nearest are "),
        ("cluster.groups.local.cout=3", "did you mean cluster.groups.local.count"),
        ("+cluster.groups.local.cout=3", "did you mean cluster.groups.local.count"),
        (
            "cluster.groups.loca.count=3",
            "cluster.groups.loca does not exist: cluster.groups has local; did you mean cluster.groups.local? "
            "a file of your own can add it",
        ),
        ("+cluster.topology={a: {groups: [local], rate: 3}}", "cluster.topology.a.rate is not a key; did you mean"),
        ("cluster.topology=5", "cluster.topology=5: must be a group of keys"),
        ("data.blend=[{prefx: a}]", "data.blend: prefx is not a key; did you mean data.prefix"),
        ("model=tniy", "Could not find 'model/tniy'; did you mean tiny? model can be 13b, 2.7b, 6.7b, alexnet, "),
        ("+gpu@cluster.gpus.b=a11", "Could not find 'gpu/a11'; did you mean a10? gpu can be a10, a100_40gb"),
        ("modell@cluster=tiny", "modell@cluster=tiny: no group modell; did you mean model? the groups are"),
        ("modle", "modle is not KEY=VALUE; did you mean model=…?"),
        ("name=[1", "name=[1: the value cannot be read: no viable alternative"),
        ("model=3", "Could not find 'model/3'; model can be "),
        ("model=[1,2]", "model=[1,2]: give a group the name of one of its files"),
        ("notify.mail=a@x,b@y", "a value with commas in two pairs of quotes, 'notify.mail=\"a@x,b@y\"'"),
        ("model=tiny,xl", "model=tiny,xl: several values make a sweep, which needs 'tdpp launch -m'"),
        ("parallel.schedule=1f1b", "parallel.schedule=1f1b: '1f1b' is not one of gpipe, one_f_one_b"),
        ("train.lr=much", "train.lr=much: must be a number, not 'much'"),
        ("name=${modle.name}", "name cannot be resolved: Interpolation key 'modle.name' not found"),
        ("~model", "model"),
    ],
    ids=lambda value: value if "=" in value[:20] else "",
)
def test_a_word_that_cannot_be_is_one_line(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        compose([word])
    assert "\n" not in str(caught.value)
    assert "search path" not in str(caught.value).lower()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        *(
            (word, "tdpp sets Hydra's own configuration itself; leave it out")
            for word in (
                *(
                    "hydra.run.dir=new",
                    "hydra.sweep.dir=new",
                    "hydra.output_subdir=new",
                    "+hydra.x=1",
                    "~hydra",
                    "hydra=a",
                ),
                *(
                    "hydra.verbose=5",
                    "hydra/launcher=basic",
                    "hydra.callbacks.a._target_=os.getcwd",
                    "hydra.sweeper._target_=a",
                    "hydra.sweeper.sampler={_target_:os.getcwd}",
                    "hydra.sweeper.custom_search_space=os.getcwd",
                ),
                *(
                    "hydra/output=default",
                    "++hydra.job.chdir=true",
                    "hydra.sweeper.params.a=b",
                    "hydra.searchpath=[a]",
                    "hydra@a=b",
                ),
            )
        ),
        ("train.seed=range(1,999999999)", "a range of 999999998 values; at most 10000"),
        ("train.seed=range(start=0, stop=1e9)", "a range of 1000000000 values"),
        ("train.lr=range(0,1,1e-9)", "a range of 1000000000 values"),
        ("train.seed=1,range(20000)", "a range of 20000 values"),
        ("train.lr=range(0,1,0)", "a range of inf values"),
        (f"train.seed={'9' * 4400}", "a number of 4400 digits; at most 4000"),
        (f"+data.x=[-{'1' + '0' * 100_000}]", "a number of 100001 digits"),
        ("-p", "-p: only '--cfg job' takes --package; leave it out"),
        ("--package=model", "only '--cfg job' takes --package"),
        (f"name={'[' * 3000}", "lists and dictionaries nested more than 50"),
        (f"name={'{a:' * 60}{'}' * 60}", "lists and dictionaries nested more than 50"),
        ("name=\udcff", "name=\\xff: not UTF-8"),
    ],
    ids=lambda value: value[:30].encode(errors="replace").decode() if "=" in value[:20] else "",
)
def test_a_word_that_hydra_must_not_see_is_one_short_line(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        compose([word])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "word",
    ["hydra.sweeper.max_batch_size=1", "hydra/sweeper=basic", "hydra/sweeper/sampler=tpe", "hydra.sweeper.a.b=1"],
)
def test_what_is_of_the_sweeper_is_for_launch(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(word)}: only 'tdpp launch' takes this option"):
        compose([word])
    with command_line([word]) as found:
        assert found.overrides == (word,)


@pytest.mark.parametrize("length", [999, 100_000])
def test_a_message_is_readable_however_long_what_it_quotes(length: int) -> None:
    with pytest.raises(ConfigError, match=r"is not a key; 'tdpp|File name too long") as caught:
        compose([f"a{'x' * length}=1"])
    assert len(str(caught.value)) < 1200


FAULTY = {
    "misspelt": (
        MODEL.replace("hidden:", "hiden:"),
        "{path}, line 3: model.hiden is not a key; did you mean model.hidden",
    ),
    "type": (
        MODEL.replace("4", "four", 1),
        "{path}, line 2: model.layers: must be a whole number, not 'four'",
    ),
    "bracket": (
        MODEL + "heads: [4\n",
        "{path}: not YAML: while parsing a flow sequence: expected ',' or ']'",
    ),
    "tab": (
        MODEL.replace("heads", "\theads"),
        "{path}: not YAML: while scanning for the next token: found character '\\t'",
    ),
    "twice": (
        MODEL + "name: again\n",
        "{path}: not YAML: while constructing a mapping: found duplicate key name (line 7,",
    ),
    "reference": ("name: ${\n", "{path}: name: no viable alternative at input '${'"),
    "zero": ("name: a\0b\n", "{path}: not YAML: unacceptable character #x0000"),
    "digits": (
        MODEL.replace("4", "9" * 5000, 1),
        "{path}: a value cannot be read: a whole number has too many digits",
    ),
    "bytes": (b"name: \xff\n", "{path}: not a text file: byte 6 is not UTF-8"),
    "number": ("5\n", "{path}: the file has no keys"),
    "list": ("- a\n", "{path}: Invalid type assigned: list is not a subclass of Model"),
    "defaults": ("defaults: [nope]\n" + MODEL, "{path}: Could not find 'model/nope'"),
    "empty": ("", "model.name is not set: give model.name=…, or choose a file that sets it"),
}
"""What a file says, and what is told of it."""


@pytest.mark.parametrize(
    ("fault", "by"),
    each(
        [*FAULTY],
        ["folder", "file"],
        always=[("misspelt", "folder"), ("tab", "folder"), ("list", "folder"), ("defaults", "folder")],
    ),
)
def test_a_file_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, by: str) -> None:
    text, told = FAULTY[fault]
    (tmp_path / "model").mkdir()
    path = tmp_path / "model/mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())  # type: ignore[attr-defined]
    words = [f"--config-dir={tmp_path}", "model=mine"] if by == "folder" else [f"model={path}"]
    with pytest.raises(ConfigError, match=re.escape(told.replace("{path}", str(path)))) as caught:
        compose(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f"a: &a [{'x, ' * 99}]\nb: &b [{'*a, ' * 99}]\nc: [{'*b, ' * 99}]\n",
            "with its aliases .* more than 200000 values",
        ),
        ("a: " + "[" * 9000, "mappings and lists are nested more than 50 deep"),
        (None, "it has 1099511627776 bytes; a configuration has at most"),
    ],
    ids=["bomb", "deep", "large"],
)
def test_a_file_that_would_fill_the_memory_is_not_given_to_hydra(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "mine.yaml"
    with path.open("w") as file:
        file.write(text) if text is not None else file.truncate(2**40)
    with pytest.raises(ConfigError, match=f"^{path}: {told}"):
        compose([f"model={path}"])


def test_words_that_contradict_each_other_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^\+model\.layers=7 ~model: Hydra cannot apply all of these; leave out"):
        compose(["+model.layers=7", "~model"])


def test_several_values_in_the_place_of_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^container\.mounts\.0=\[0\.5, 1\] must be one value, not several$"):
        compose(["container.mounts=[[.5,1]]"])


def test_a_file_that_cannot_be_and_is_not_used_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/broken.yaml").write_text("name: [")
    assert compose([f"--config-dir={tmp_path}", "model=xl", "parallel.partition=null"]).model.name == "xl"


WORDS = st.builds(
    "{}{}={}".format,
    st.sampled_from(["", "+", "++", "~"]),
    st.sampled_from(
        ["model", "model.layers", "cluster.groups", "cluster.gpus.cpu", "gpu@cluster.gpus.x", "hydra.mode"]
    ),
    st.text("ab1=.,[]{}$'\"\\~+@/ ", max_size=6),
)


@settings(max_examples=fewer(40, 100), deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=2))
def test_no_words_end_in_a_traceback(words: list[str]) -> None:
    try:
        compose(words)
    except ConfigError as error:
        assert str(error)


def test_a_fault_of_ours_keeps_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError), command_line([]):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="ours"), command_line([]):
        raise ValueError("ours")


def test_the_groups_are_the_folders() -> None:
    assert groups() == {
        *("cluster", "container", "data", "engine", "executor", "experiment", "gpu", "model", "parallel", "train")
    }


def test_a_misspelt_choice_in_a_folder_of_a_group_is_told_with_the_right_one() -> None:
    with pytest.raises(ConfigError) as told:
        compose(["experiment=pipedream/vgg16_16pipedream"])
    assert "did you mean pipedream/vgg16_16_pipedream" in str(told.value)
    assert "parts/" not in str(told.value)
