"""The page for people who come from the shell scripts names every field, and only keys and commands that exist."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from conf.compose import compose
from conf.schema.experiment import Experiment
from launch.cli import COMMANDS
from launch.control.megatron_lm import pretrain_options
from megatron_ext.contract.models.model import OPTIONS, families_with
from tests.support import ROOT
from tests.support.launch.megatron_lm import pretrain_gpt

TEXT = (ROOT / "docs" / "from-shell-scripts.md").read_text(encoding="utf-8")

FIELDS = [
    "HOMOGENEOUS_CLUSTER",
    "MODEL",
    "NPROC_PER_NODE",
    "NNODES",
    "WORLD_SIZE",
    "GLOBAL_BATCH_SIZE",
    "MICRO_BATCH_SIZE",
    "TENSOR_MP_SIZE",
    "DP_SIZE",
    "PIPELINE_MP_SIZE",
    "PARTITION",
    "ZERO",
    "NSYS",
    "PROFILE",
    "MASTER_PORT",
    "RELOAD_CONTAINER",
]
"""Of `_00_conf.sh`."""


def rows(heading: str) -> list[tuple[str, str]]:
    """First and second cell of each row of the table below a heading."""
    section = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    table = next(part for part in section if part.startswith(heading))
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in table.splitlines() if line.startswith("|")]
    return [(first.strip(), second.strip()) for first, second, _ in cells[2:]]


def keys(cls: type, prefix: str = "") -> set[str]:
    """Every key of the schema; an entry of a dict is `<group>`, as for node groups."""
    found = set()
    for name, hint in get_type_hints(cls).items():
        found.add(prefix + name)
        nested = [hint, *get_args(hint)]
        for kind in filter(is_dataclass, nested):
            between = "" if kind is hint else "<group>."
            found |= keys(kind, f"{prefix}{name}.{between}")
    return found


FILES = ("`_00_conf.sh`", "`_02_homo_job.sh`")
ENGINE = ("engine=megatron_lm", "engine.checkout=/opt/megatron-lm")
OF_EXPERTS = {"num-experts", "moe-router-topk"}
"""Options that become keys of engine=megatron_core alone."""
MAPPED = [
    (field, key)
    for heading in (*FILES, "Options of `pretrain_gpt.py`")
    for field, cell in rows(heading)
    for key in re.findall(r"`([^`]+)`", cell)
]


def test_every_field_of_the_configuration_script_has_its_row_in_order() -> None:
    assert [field.strip("`") for field, _ in rows("`_00_conf.sh`")] == FIELDS


def test_every_field_has_a_key() -> None:
    headings = (*FILES, "Options of")
    assert {field for field, _ in MAPPED} == {field for heading in headings for field, _ in rows(heading)}


def test_the_table_of_options_has_all_that_tdpp_gives_and_none_that_megatron_lm_does_not_know() -> None:
    named = [option for cell, _ in rows("Options of") for option in re.findall(r"`--([^`]+)`", cell)]
    assert len(named) == len(set(named))
    given: set[str] = set()
    for overrides in ([], ["engine.vocab_file=v.json", "engine.merge_file=m.txt"], ["train.precision=fp16"]):
        experiment = compose(["experiment=seed_a10x8", *ENGINE, "train.precision=bf16", *overrides])
        given |= pretrain_options(experiment, Path("checkpoints")).keys()
    assert set(named) - OF_EXPERTS == given
    assert set(named) > OF_EXPERTS
    assert {f"--{name}" for name in named} <= set(pretrain_gpt.OPTIONS.read_text().split())


def test_every_option_of_a_decoder_has_a_row() -> None:
    cells = [cell for _, cell in rows("Options of")]
    for key in (
        OPTIONS.keys() - {key for key in OPTIONS if families_with(key) and "gpt" not in families_with(key)} - {"family"}
    ):
        assert f"`model.{key}`" in cells


@pytest.mark.parametrize(("field", "key"), MAPPED, ids=[f"{field} is {key}" for field, key in MAPPED])
def test_every_key_named_exists(field: str, key: str) -> None:
    assert key in keys(Experiment)


def test_the_keys_of_the_schema_are_those_that_a_configuration_has() -> None:
    assert {key for key in keys(Experiment) if "." not in key} == {field.name for field in fields(compose())}


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`tdpp (\w+)", TEXT))))
def test_every_command_named_exists(command: str) -> None:
    assert command in COMMANDS


@pytest.mark.parametrize("choice", sorted(set(re.findall(r"`((?:experiment|data|model)=\w+)`", TEXT))))
def test_every_choice_named_composes(choice: str) -> None:
    assert compose([choice, *(["parallel.partition=null"] if choice.startswith("model") else [])])
