"""Words of a command line: any key of the schema with any value, and what is not a key at all."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from random import Random

from conf.hydra_errors import known_keys
from conf.reading.own_folders import groups
from conf.reading.user_files import choices
from tests.fuzz.corpora import write_corpus
from tests.fuzz.mutate import hurt

KEYS = [key for key in known_keys() if key != ("dry_run",)]  # no fuzzer starts a run
GROUPS = sorted(groups())
NAMES = ("local", "cpu", "gpu2", "a", "0", "A_B", "TDPP_RUN_TOKEN", "HF_TOKEN", "ü", "a b", "", "~")
"""Of the entries of dictionaries."""
NUMBERS = (
    *("0", "1", "2", "3", "4", "-1", "1.5", "0.0", "-0.0", "1e-300", "1e300", "1e400", "inf", "-inf", "nan", "1_000"),
    *("127", "1024", "65536", "2147483648", "4294967296", "9223372036854775808", "1000000000000", "100000000001"),
    *("0x10", "007", "9" * 40, "9" * 4400, "-" + "9" * 5000, "1" + "0" * 100_000, "1e99999", "0b1", "1e3", ".5"),
)
TEXTS = (
    *(
        "",
        " ",
        "null",
        "true",
        "false",
        "~",
        "''",
        '""',
        "a",
        "a b",
        "A,B",
        "'a",
        '"',
        "\\",
        "a=b",
        "=",
        "a:b",
        "#",
        "@",
    ),
    *("/dev/zero", "/dev/null", "/dev/full", "/dev/stdin", ".", "..", "/", "/nonexistent/x", "data", "data/a", "fifo"),
    *("./data/../data/stdlib_text_document", "data/stdlib_text_document", "data//b_text_document", "schedule.json"),
    *("mine.yaml", "missing.yaml", "/dev/zero.yaml", "loop.yaml", "data/stdlib_text_document.idx", "latest", "runs"),
    *(
        "${model.name}",
        "${model}",
        "${",
        "${}",
        "${oc.env:HOME}",
        "${oc.env:NOPE}",
        "${oc.decode:x}",
        "${oc.create:{}}",
    ),
    *(
        "${cluster}",
        "${parallel.tensor}",
        "${.}",
        "${..x}",
        "${name}",
        "${runs_dir}",
        "${sweep_dir:}",
        "${hydra:runtime}",
    ),
    *("${a.b[0]}", "${oc.dict.keys:model}", "${now:%H}", "$" * 50, "?" * 3, "???", "1-3", "2-2", "1-3-0", "0-4", "4"),
    *("[]", "[a]", "[[a]]", "[" * 3000, "[" * 40 + "]" * 40, "{}", "{a:1}", "{a: {b: [c]}}", "{" * 500, "[${model}]"),
    *("[{prefix: a}]", "[{prefix: data/b_text_document, weight: 0.5}]", "[{prefix:data/b_text_document}]", "[1,2]"),
    *("local*1", "local*99999", "local+local", "a+b", "1,2", "a,b,c", "range(1,4)", "range(1,999999999)", "glob(*)"),
    *(
        "choice(1,2)",
        "sort(3,1)",
        "shuffle(1,2)",
        "tag(a,b)",
        "interval(0,1)",
        "str(1)",
        "int(a)",
        "float([])",
        "extend_list(a)",
    ),
    *(
        "a\nb",
        "a\x00b",
        "\x1b]52;c;eA==\x07",
        "\x7f",
        "\u202e",
        "🦙",
        "ä" * 300,
        "\udcff",
        "x" * 100_000,
        "%s%n",
        "'\\''",
    ),
    *(
        "virtual",
        "anchored",
        "slurm",
        "enroot",
        "pyxis",
        "interleaved",
        "gpipe",
        "zb_h1",
        "fp16",
        "full",
        "megatron_lm",
    ),
    *("969,30,1", "1,0,0", "0,0,1", "1e999,1,1", "nan,1,1", "99999999999999999999,1,1", "a.sqsh", "docker://x"),
)
HYDRA = (
    *(
        "hydra.run.dir=new",
        "hydra.sweep.dir=new",
        "hydra.sweep.subdir=new",
        "hydra.output_subdir=new",
        "hydra.verbose=5",
    ),
    *(
        "hydra.verbose=true",
        "hydra.job.chdir=true",
        "hydra/launcher=basic",
        "hydra/launcher=joblib",
        "hydra.mode=MULTIRUN",
    ),
    *(
        "hydra.searchpath=[/nonexistent]",
        "hydra.searchpath=5",
        "hydra.help.template=x",
        "hydra=null",
        "~hydra",
        "hydra.job.name=x",
    ),
    *(
        "hydra/job_logging=default",
        "hydra/output=default",
        "hydra.callbacks.x._target_=os.getcwd",
        "+hydra.x=1",
        "hydra.job.env_set.A=b",
    ),
    *(
        "hydra.sweeper.max_batch_size=1",
        "hydra.sweeper.max_batch_size=0",
        "hydra.sweeper.params={model.layers:4}",
        "hydra/sweeper=basic",
    ),
    *(
        "hydra.sweeper.params.name='a,b'",
        "hydra.launcher.x=1",
        "hydra.runtime.output_dir=new",
        "hydra.sweeper._target_=os.system",
    ),
)
OPTIONS = (
    *(
        "-m",
        "--multirun",
        "--cfg=job",
        "--cfg",
        "job",
        "--resolve",
        "--package=model",
        "-p",
        "--info",
        "--run",
        "-h",
        "-x",
    ),
    *(
        "--config-dir=.",
        "--config-dir",
        "-cd=/nonexistent",
        "--config-name=x",
        "-cn",
        "--config-path=/",
        "--version",
        "--",
    ),
    *(
        "--hydra-help",
        "-c=hydra",
        "--shell-completion",
        "-sc",
        "--experimental-rerun=x",
        "-e",
        "",
        "=",
        "==",
        "a",
        "~",
        "+",
    ),
)
ALONE = ("-sc", "--shell-completion", "--experimental-rerun=x")
"""Only where nothing but them is tried: Hydra does something else for them."""


def draw(random: Random, folder: Path) -> list[str]:
    _files(folder)
    if random.random() < 0.1:
        hurt(random, folder / "mine.yaml")
        return ["launch", "model=mine.yaml", *_words(random)[:1], "dry_run=true"]
    return random.choice((_launch, _launch, _launch, _sweep, _doctor, _profile, _search, _prepare, _other))(random)


def _files(folder: Path) -> None:
    """What values may name."""
    write_corpus(folder / "data/stdlib_text_document")
    write_corpus(folder / "data/b_text_document")
    (folder / "mine.yaml").write_text(
        "name: mine\nlayers: 4\nhidden: 64\nheads: 4\nsequence_length: 64\nvocab_size: 300\n"
    )
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "text.txt").write_text("some text\n\nmore\n")
    (folder / "schedule.json").write_text('{"version": 1, "stages": 2, "chunks": 1, "micro_batches": 4, "actions": []}')


def _launch(random: Random) -> list[str]:
    return ["launch", *_words(random), "dry_run=true"]


def _sweep(random: Random) -> list[str]:
    return ["launch", "-m", *_words(random), "dry_run=true"]


def _doctor(random: Random) -> list[str]:
    return ["doctor", *_words(random), "dry_run=true"]


def _profile(random: Random) -> list[str]:
    own = ("tensor_sizes", "micro_batches", "seconds", "wait_min", "profile", "overwrite", "add")
    return ["profile", *_words(random), *_own(random, own), "dry_run=true"]


def _search(random: Random) -> list[str]:
    own = (
        "top",
        "csv",
        "page",
        "plan",
        "overwrite",
        "leave_out",
        "explain",
        "calibration",
        "pareto",
        "max_cost",
        "tokens",
    )
    more = ("max_days", "validate", "calibrate", "prove")
    small = ["experiment=demo", "cluster.groups.local.gpus_per_node=4", "parallel.schedule=one_f_one_b"]
    return ["search", *small, *_words(random), *_own(random, (*own, *more), but=("a", "mine.yaml"))]


def _prepare(random: Random) -> list[str]:
    command = random.choice(("prepare", "prepare", "inspect", "check", "merge", "split"))
    prefixes = [random.choice(("data/stdlib_text_document", "data/b_text_document", _text(random)))]
    if command == "prepare":
        names = ("key", "documents", "tokenizer", "vocab-file", "merge-file", "train-bpe", "end-of-document")
        more = ("min-chars", "max-chars", "max-mb")
        start = ["--source", random.choice(("text.txt", "text.txt", "data", _text(random))), "--workers=1"]
        start += [f"--output={random.choice(('made', 'data/b', _text(random)))}"]
        return ["data", command, *start, *_options(random, (*names, *more)), *random.sample(["--unique", "--force"], 1)]
    names = {
        "inspect": ("document", "sample", "sequence-length", "seed", "split", "samples", "page"),
        "check": ("vocab-size",),
        "merge": ("output",),
        "split": ("weights", "output"),
    }[command]
    if command == "merge":
        prefixes.append("data/b_text_document")
    return ["data", command, *prefixes, *_options(random, names)]


def _other(random: Random) -> list[str]:
    command = random.choice(("status", "logs", "runs", "report", "stop", "completion", "launch", "help", "", "lunch"))
    names = (
        "runs-dir",
        "node",
        "tail",
        "verdict",
        "kind",
        "limit",
        "output",
        "watch",
        "json",
        "csv",
        "iteration",
        "raw",
    )
    words = [_text(random)] if random.random() < 0.7 else []
    if command == "launch":
        words = [random.choice((*ALONE, f"resume={_text(random)}"))]
    return [command, *words, *([] if command == "launch" else _options(random, names))]


def _options(random: Random, names: tuple[str, ...]) -> list[str]:
    return [f"--{name}={_value(random)}" for name in random.sample(names, min(len(names), random.choice((0, 1, 1, 2))))]


def _own(random: Random, names: tuple[str, ...], but: tuple[str, ...] = ()) -> list[str]:
    """Words of a command's own; a plan of a name is kept in tdpp itself, where no test writes."""
    words = [f"{name}={_value(random)}" for name in random.sample(names, random.choice((0, 0, 1, 2)))]
    return [word for word in words if not (but and word.startswith("plan=") and not word.endswith(".yaml"))]


def _words(random: Random) -> list[str]:
    return [_word(random) for _ in range(random.choice((0, 1, 1, 1, 2, 3, 5)))]


def _word(random: Random) -> str:
    chance = random.random()
    if chance < 0.05:
        return random.choice(HYDRA)
    if chance < 0.08:
        return random.choice([option for option in OPTIONS if option not in ALONE])
    if chance < 0.2:
        return f"{_prefix(random)}{_group(random)}"
    if chance < 0.23:
        return "".join(random.choices(string.printable, k=random.randrange(12)))
    key = ".".join(random.choice(NAMES) if part == "*" else part for part in random.choice(KEYS))
    if chance < 0.28:
        key = _spoilt(random, key)
    prefix = _prefix(random)
    if prefix == "~" and random.random() < 0.5:
        return f"~{key}"
    return f"{prefix}{key}={_value(random)}"


def _group(random: Random) -> str:
    group = random.choice(GROUPS)
    package = random.choice(("", "", "", "@model", "@cluster.gpus.b", "@", "@:", "@a@b"))
    names = [*choices(group, []), "mine.yaml", "missing.yaml", "null", "5", _value(random)]
    return f"{group}{package}={random.choice(names)}"


def _prefix(random: Random) -> str:
    return random.choice(("", "", "", "", "", "+", "++", "~"))


def _value(random: Random) -> str:
    makers: list[Callable[[Random], str]] = [_number, _number, _text, _text, _list, _quoted]
    return random.choice(makers)(random)


def _number(random: Random) -> str:
    return (
        random.choice(NUMBERS)
        if random.random() < 0.6
        else str(random.choice((1, -1)) * random.getrandbits(random.choice((3, 3, 8, 16, 33, 65))))
    )


def _text(random: Random) -> str:
    return random.choice(TEXTS)


def _list(random: Random) -> str:
    return random.choice(("[{}]", "{}", "{{a:{}}}", "[[{}]]")).format(
        ",".join(random.choice((_number, _text))(random) for _ in range(random.randrange(4)))
    )


def _quoted(random: Random) -> str:
    mark = random.choice("'\"")
    return f"{mark}{_text(random)}{mark}"


def _spoilt(random: Random, key: str) -> str:
    place = random.randrange(len(key) + 1)
    return (
        key[:place]
        + random.choice((".", "..", "x", "_", "[0]", "@", "/", "-", " ", "ü", "*", ":", "{", "\x00"))
        + key[place + random.randrange(2) :]
    )
