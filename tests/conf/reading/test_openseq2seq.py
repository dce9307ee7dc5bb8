"""Configurations of OpenSeq2Seq, read and not run."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.reading.openseq2seq import words_of
from conf.reading.python_values import Imported, Unread, values

SMALL = """
from encoders_of_old import TransformerEncoder, TransformerDecoder
from losses_of_old import PaddedCrossEntropyLossWithSmoothing, transformer_policy
import tensorflow as tf
import os

width = 64
depth = 2
root = "/corpus"
both = {"hidden_size": width, "num_heads": 4, "filter_size": 4 * width, "attention_dropout": 0.1,
        "relu_dropout": 0.2, "layer_postprocess_dropout": 0.2}
base_params = {
    "num_gpus": 2, "use_horovod": False, "batch_size_per_gpu": 8, "max_steps": 1000, "print_loss_steps": 20,
    "save_checkpoint_steps": 500, "eval_steps": 100, "logdir": "logs", "dtype": "mixed", "loss_scaling": "LogMax",
    "max_grad_norm": 2.5, "optimizer": tf.contrib.opt.LazyAdamOptimizer,
    "optimizer_params": {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-09},
    "lr_policy": transformer_policy,
    "lr_policy_params": {"learning_rate": 2.0, "warmup_steps": 400, "d_model": width},
    "encoder": TransformerEncoder, "encoder_params": dict(both, encoder_layers=depth),
    "decoder": TransformerDecoder,
    "decoder_params": {**both, "num_hidden_layers": depth + 1, "beam_size": 4, "alpha": 0.6},
    "loss": PaddedCrossEntropyLossWithSmoothing, "loss_params": {"label_smoothing": 0.1},
}
train_params = {
    "data_layer_params": {"max_length": 48, "source_file": os.path.join(root, "train.en"),
                          "target_file": os.path.join(root, "train.de"), "colour": "blue"},
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


def test_a_file_is_a_whole_experiment(file: Path) -> None:
    made = compose([f"openseq2seq={file}", "model.vocab_size=400"])
    model, train, parallel = made.model, made.train, made.parallel
    assert (model.family, model.name, model.layers, model.decoder_layers) == ("transformer", "small", 2, 3)
    assert (model.hidden, model.heads, model.ffn_hidden, model.sequence_length) == (64, 4, 256, 48)
    assert (model.hidden_dropout, model.attention_dropout, model.label_smoothing) == (0.2, 0.1, 0.1)
    assert (train.optimizer, train.adam_beta2, train.adam_eps, train.weight_decay) == ("adam", 0.98, 1e-9, 0.0)
    assert (train.lr_policy, train.lr_warmup_iterations, train.iterations) == ("noam", 400, 1000)
    assert train.lr == pytest.approx(2 / math.sqrt(64 * 400))
    assert (train.precision, train.loss_scaler, train.clip_grad) == ("fp16", "logmax", 2.5)
    assert (train.log_interval, train.save_interval, train.eval_interval) == (20, 500, 100)
    assert (parallel.data, parallel.pipeline, parallel.micro_batch_size, parallel.global_batch_size) == (2, 1, 8, 16)
    assert made.data.prefix == "data/small"


def test_words_of_the_command_line_are_stronger(file: Path) -> None:
    made = compose(["train.iterations=7", f"openseq2seq={file}", "parallel.data=3", "data.prefix=data/mine"])
    assert (made.train.iterations, made.parallel.global_batch_size, made.data.prefix) == (7, 24, "data/mine")


def test_what_has_no_place_here_is_said(file: Path) -> None:
    _, notes = words_of(file)
    assert notes == [
        "the search is set when translating: tdpp translate --beam 4 --length-norm 0.6",
        "its sentences (/corpus/train.en, /corpus/train.de) must be prepared with tdpp data pairs --output data/small; "
        "give the model.vocab_size that it prints",
        "unknown to tdpp, so ignored: data_layer_params.colour",
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"optimizer": tf.contrib.opt.LazyAdamOptimizer', '"optimizer": NovoGrad', "optimizer="),
        ('"lr_policy": transformer_policy', '"lr_policy": "exp_decay"', "lr_policy=exp_decay: transformer_policy, "),
        ('"loss_scaling": "LogMax"', '"loss_scaling": "Weird"', "loss_scaling=Weird: Backoff and LogMax are supported"),
        ('"max_steps": 1000', '"max_steps": steps()', "max_steps=line "),
        ('"max_steps": 1000, ', "", "neither max_steps nor num_epochs is given"),
        (
            '"hidden_size": width',
            '"hidden_size": True',
            "encoder_params.hidden_size=True: its value cannot be evaluated",
        ),
        ('"d_model": width', '"d_model": width, "max_lr": 1e-6', "lr_policy_params.max_lr=1e-06: the rate would rise"),
        (
            '"encoder": TransformerEncoder',
            '"encoder": ConvS2SEncoder',
            "only TransformerEncoder with TransformerDecoder",
        ),
        ('"use_horovod"', '"larc_params": {"larc_eta": 1}, "use_horovod"', "larc_params=dict: tdpp has no LARC"),
    ],
    ids=lambda text: str(text)[:24],
)
def test_what_cannot_be_expressed_is_refused(file: Path, old: str, new: str, said: str) -> None:
    assert old in SMALL
    file.write_text(SMALL.replace(old, new))
    with pytest.raises(ConfigError) as error:
        compose([f"openseq2seq={file}"])
    assert str(error.value).startswith(f"openseq2seq={file} cannot be trained unchanged:\n  ")
    assert said in str(error.value)


def test_each_fault_has_a_line(file: Path) -> None:
    file.write_text(SMALL.replace('"dtype": "mixed"', '"dtype": "bf8"').replace('"max_steps": 1000, ', ""))
    with pytest.raises(ConfigError) as error:
        words_of(file)
    assert len(str(error.value).splitlines()) == 3


GROWS = {
    "doubled list": "x = [1]\n" + "x = x + x\n" * 60,
    "doubled text": "x = 'ab'\n" + "x = x + x\n" * 60,
    "joined paths": "import os\nx = 'ab'\n" + "x = os.path.join(x, x)\n" * 60,
    "many lists": "".join(f"x{line} = [0] * 100000\n" for line in range(2000)) + "x = x1999\n",
    "list in lists": "import copy\nx = [1] * 1000\n" + "x = [x] * 1000\n" * 5 + "x = copy.deepcopy(x)\n",
    "merged": "a = {'a': 1}\n" + "".join(f"a = {{**a, 'k{n}': 1}}\n" for n in range(2000)) + "x = a\n",
    "squares": "x = 3\n" + "x = x * x\n" * 40,
    "powers": "x = 9 ** 9 ** 9 ** 9\n",
    "digits": "x = 0x" + "f" * 100_000 + "\n",
    "width": "x = '%1000000000d' % 1\n",
    "itself": "import copy\nx = {}\nx['k'] = x\nx = copy.deepcopy(x)\n",
}


@pytest.mark.parametrize("text", GROWS.values(), ids=GROWS)
def test_a_file_that_grows_is_refused_with_its_line_and_takes_little_memory(tmp_path: Path, text: str) -> None:
    path = tmp_path / "grows.py"
    path.write_text(f"{text}base_params = {{'encoder': x}}\n")
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"grows.py[^\n]*(\n  encoder=)?line \d+: "):
            words_of(path)
        assert tracemalloc.get_traced_memory()[1] < 1e8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [1]\n" + "x = [x, x]\n" * 60 + "base_params = x", "base_params is not a dictionary .*: list"),
        ("x = [1]\n" + "x = [x, x]\n" * 60 + "base_params = {'encoder': x}", "encoder=list: only Transf"),
        ("x = " + "9" * 5000, "line 1 has an integer of too many digits"),
        ("x = " + "-" * 100_000 + "1", "nested too deeply"),
        ("x = 1\0", "null bytes"),
        ("a = {}\na[[1]] = 2", r"line 2: '\[1\]' cannot be a key"),
        ("base_params = {'encoder': int(1e999)}", r"encoder=line 1: 'int\(1e999\)': cannot convert float infinity"),
    ],
    ids=["shared lists", "shared lists in it", "digits", "signs", "NUL", "list as a key", "infinite"],
)
def test_no_file_ends_in_a_traceback(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        words_of(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('x')", "tdpp reads the file without running it"),
        ("for k in range(3):\n    pass", "tdpp reads the file without running it"),
        ("a = (", "this is not a Python file"),
        ("a = 1", "no base_params"),
    ],
    ids=["call", "loop", "syntax", "other"],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "other.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        words_of(path)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"openseq2seq=nowhere.py: cannot be read: No such file or directory"):
        compose(["openseq2seq=nowhere.py"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * 3 + 1", 7),
        ("'a' + 'b'", "ab"),
        ("'%s/b' % 'a'", "a/b"),
        ("[(1, 2)] * 2 + [3]", [[1, 2], [1, 2], 3]),
        ("math.sqrt(0.25)", 0.5),
        ("os.path.join('a', 'b')", "a/b"),
        ("{**base, 'k': 2}", {"k": 2, "l": [1]}),
        ("base | {'m': -1}", {"k": 1, "l": [1], "m": -1}),
        ("dict(base, m=3)", {"k": 1, "l": [1], "m": 3}),
        ("copy.deepcopy(base)", {"k": 1, "l": [1]}),
        ("base.copy()", {"k": 1, "l": [1]}),
        ("base['l'][0]", 1),
        ("tf.float32", Imported("tf.float32")),
    ],
    ids=str,
)
def test_values_are_those_that_python_gives(text: str, value: Any) -> None:
    before = "import math, os, copy\nimport tensorflow as tf\nbase = {'k': 1, 'l': [1]}\n"
    assert values(f"{before}a = {text}\n")["a"] == value


@pytest.mark.parametrize(
    "text",
    ["f(1)", "tf.a(1)", "unknown", "[k for k in base]", "10 ** 10 ** 10", "'a' * 10 ** 9", "1 / 0", "'%s' % [1]"],
)
def test_what_is_not_certain_has_no_value(text: str) -> None:
    assert isinstance(values(f"import tensorflow as tf\nbase = [1]\na = {text}\n")["a"], Unread)


def test_a_copy_changes_alone_and_an_alias_does_not() -> None:
    text = "import copy\na = {'k': {'x': 1}}\nb = copy.deepcopy(a)\nc = a\nb['k']['x'] = 2\nc.update({'m': 3})\n"
    known = values(text)
    assert (known["a"], known["b"]) == ({"k": {"x": 1}, "m": 3}, {"k": {"x": 2}})


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    known = values(f"import pathlib\na = pathlib.Path({str(mark)!r}).touch()\n")
    assert isinstance(known["a"], Unread)
    assert not mark.exists()
