"""`tdpp init model`: a model's configuration from Hugging Face's config.json."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.compose import compose, compose_unchecked, to_object
from conf.errors import reworded
from conf.reading.files import Scratch, why_not_kept, write_whole
from conf.reading.own_folders import SHIPPED, SUFFIX, path_of
from conf.reading.parser import Parser, option
from conf.reading.values import whole
from conf.schema.experiment import Model
from launch.errors import LaunchError
from launch.init.yaml_text import model_text
from megatron_ext.checkpoints.published import is_published
from megatron_ext.contract.files import read_regular_text
from megatron_ext.contract.models.hf_config import AnotherModelError, HfConfig, HfConfigError
from megatron_ext.contract.models.keys import DEFAULT
from megatron_ext.contract.models.model import family_named, family_names

CONFIG = "config.json"
MOST_BYTES = 2**24
TRANSFORMERS = "huggingface"
"""The family whose models are those of transformers."""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp init model <argv>`; returns 0 once the model is written."""
    arguments = parser().parse_args(argv)
    file = arguments.source / CONFIG if arguments.source.is_dir() else arguments.source
    named = file.resolve().parent.name if file.name == CONFIG else file.stem
    name = checked_name(arguments.name or named)
    paths = {"model": free_path(name, "model", arguments.force)}
    values, notes = from_hf(str(file), _content(file), arguments.sequence_length)
    folder = file.absolute().parent
    weights = folder if file.name == CONFIG and is_published(folder) else None
    if weights is not None:
        notes = [*notes, f"weights: {weights}"]
    text = model_text(name, values, str(file), notes)
    model = _checked(name, text)
    write_all(paths, {"model": text})
    for note in notes:
        print(f"# {note}")
    count = f", {model.parameters():,} parameters" if model.config is None else ""
    print(f"written: {paths['model']}: {model.family}{count}")
    print(f"\nnext:\n  tdpp search experiment=mine model={name}")
    if weights is not None:
        for command in _with_weights(name, model, weights):
            print(f"  {command}")
    return 0


def _with_weights(name: str, model: Model, weights: Path) -> list[str]:
    """The commands that begin a training with published weights."""
    if model.traits.published or model.traits.megatron_lm:
        return [shlex.join(["tdpp", "launch", "experiment=mine", f"model={name}", f"train.load={weights}"])]
    return []


def parser() -> Parser:
    made = Parser(
        prog="tdpp init model",
        description="Write a model into your folder of configurations, from a Hugging Face config.json: GPT-2, Llama, "
        "Mistral, Qwen 2 and 3, Gemma 2 and 3, StableLM, BERT, T5, ViT or ResNet. Other causal models, and those that "
        "tdpp would compute differently, are trained with the layers of transformers; it refuses any other model that "
        "tdpp would compute differently.",
    )
    made.add_argument("source", metavar="FILE_OR_DIR", type=Path, help="a config.json, or the folder that has it")
    made.add_argument("name", metavar="NAME", nargs="?", help="the model's name (default: the folder's name)")
    made.add_argument(
        "--sequence-length",
        metavar="N",
        type=option(whole),
        help="the tokens of a sample (default: the longest that the model takes)",
    )
    made.add_argument("--force", action="store_true", help="replace an existing file")
    return made


def _content(file: Path) -> object:
    try:
        return json.loads(read_regular_text(file, MOST_BYTES))
    except OSError as error:
        raise LaunchError(f"{file}: {error.strerror}; give a config.json, or the folder that has it") from error
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"{file}: not JSON ({error}); give the config.json of a model that Hugging Face's transformers can read"
        ) from error


def _checked(name: str, text: str) -> Model:
    """The model, as every command will read it; raises ConfigError where it breaks a rule."""
    with Scratch() as folder:
        file = folder.path / f"{name}{SUFFIX}"
        file.write_text(text, encoding="utf-8")
        return to_object(compose_unchecked([f"model={file}"]), Model, "model")


OWN_FOLDER = "create a folder that you may write to, and name it in TDPP_CONFIG"
"""Where the usual folder of configurations is closed to the user."""


def checked_name(name: str) -> str:
    """Raises LaunchError for one that Hydra and a folder of runs cannot both have."""
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name) or name.endswith(SUFFIX):
        raise LaunchError(
            f"{name!r} cannot name a configuration; a name is a letter followed by letters, digits, '.', '_' and '-'"
        )
    return name


def free_path(name: str, group: str, force: bool) -> Path:
    """Where a configuration of this name is written. Raises LaunchError: there is one, or it cannot be written."""
    shipped = SHIPPED / group
    path = path_of(name, group, shipped)
    if (why := why_not_kept(name, path, instead=OWN_FOLDER)) is not None:
        raise LaunchError(f"{group}={name}: {why}")
    if path.exists() and path.parent == shipped:
        raise LaunchError(f"{group}={name} comes with tdpp ({path}); choose another NAME")
    if path.exists() and not force:
        raise LaunchError(f"{path} already exists; choose another NAME, or add --force to replace it")
    return path


def check_composes(name: str, texts: Mapping[str, str], word: str) -> None:
    """Raises ConfigError where files with these texts, by group, would break a rule: then none is written."""
    with Scratch() as folder:
        for group, text in texts.items():
            file = folder.path / group / f"{name}{SUFFIX}"
            file.parent.mkdir()
            file.write_text(text, encoding="utf-8")
        compose([word, f"--config-dir={folder.path}"])


def write_all(paths: Mapping[str, Path], texts: Mapping[str, str]) -> None:
    """Raises OutputError where there is no room."""
    for group, path in paths.items():
        write_whole(path, texts[group])


def from_hf(path: str, content: object, sequence_length: int | None = None) -> tuple[dict[str, object], list[str]]:
    """The keys of the model that a config.json describes, and notes on what is different here.

    Sequences have this length, or that of the longest ones the model knows.

    Raises:
        LaunchError: no family here is that model; the message names the key, its value and why.
    """
    if not isinstance(content, dict):
        raise LaunchError(f"{path}: must be a JSON object, as Hugging Face's config.json is")
    kind = content.get("model_type")
    by_type = {each: family_named(name) for name in family_names() for each in family_named(name).model_types}
    if not isinstance(kind, str):
        raise LaunchError(
            f"{path}: model_type={json.dumps(kind)}: must name a family of transformers, such as {', '.join(by_type)}"
        )
    config = HfConfig(path, content, sequence_length)
    if kind not in by_type:
        return _of_transformers(config, f"tdpp has no {kind} of its own")
    family = by_type[kind]
    try:
        config.must("is_encoder_decoder", family.decoder, "the model has another architecture than tdpp's")
        config.must("add_cross_attention", False, "tdpp has no cross-attention to another model")
        values = family.from_hf(config)
    except AnotherModelError as error:
        if not family.running_text:
            raise LaunchError(str(error)) from error
        try:
            why = str(error).removeprefix(f"{path}: ")
            return _of_transformers(HfConfig(path, content, sequence_length), f"tdpp's own is another model ({why})")
        except LaunchError:  # this model is none of theirs either
            raise LaunchError(str(error)) from error
    except HfConfigError as error:
        raise LaunchError(str(error)) from error
    if sequence_length is not None and "sequence_length" not in values:
        raise LaunchError(f"--sequence-length {sequence_length}: a {kind} has no sequences; leave it out")
    return {**({} if family.name == DEFAULT else {"family": family.name}), **values}, config.notes


def _of_transformers(config: HfConfig, why: str) -> tuple[dict[str, object], list[str]]:
    """The same of a model that tdpp has not itself, for the reason `why`: its layers are those of transformers."""
    family = family_named(TRANSFORMERS)
    with reworded(LaunchError, "", of=HfConfigError):
        config.must("is_encoder_decoder", False, "tdpp cuts causal models of transformers, which have no encoder")
        config.must("add_cross_attention", False, "tdpp has no cross-attention to another model")
        parts = [key for key, value in config.content.items() if key.endswith("_config") and isinstance(value, dict)]
        if "text_config" in parts and "num_hidden_layers" not in config.content:
            raise LaunchError(
                f"{config.path}: a {config.kind} consists of several models ({', '.join(parts)}), and tdpp trains one "
                "of text alone; give a config.json that has what text_config has, with its model_type"
            )
        values = family.from_hf(config)
    note = (
        f"{why}: this {config.kind} is trained with transformers' own layers (model.family={TRANSFORMERS}), so its "
        "ranks need transformers; what cannot be cut is refused before a run starts (docs/models.md)"
    )
    return {"family": TRANSFORMERS, **values, "config": str(Path(config.path).absolute())}, [note]
