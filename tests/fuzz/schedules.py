"""Damaged schedules, and schedules that do something else than the plan."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from megatron_ext.contract.schedule.iteration import as_json, schedule
from megatron_ext.contract.schedule.schedules import NAMES
from tests.fuzz.corpora import write_corpus
from tests.fuzz.mutate import hurt, replaced_oddly

VALUES = (
    *(
        None,
        True,
        0,
        1,
        2,
        3,
        -1,
        2**31,
        10**30,
        1.0,
        1.5,
        float("nan"),
        "",
        "forward",
        "\x1b[2J",
        "x" * 9000,
        [],
        {},
        [[]],
    ),
    *([["forward", 0, 0]], ["forward", 0], ["forward", 0, 0, 0], [None, 0, 0], ["send_forward", 10**20, 0]),
)


def draw(random: Random, folder: Path) -> list[str]:
    write_corpus(folder / "data/stdlib_text_document")
    chunks = random.choice((1, 1, 2))
    name = "interleaved" if chunks == 2 else random.choice([name for name in NAMES if name != "interleaved"])
    content: Any = as_json(schedule(name, 2, chunks, 4), chunks, 4)
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        _change(random, content)
    path = folder / "mine.json"
    path.write_text(json.dumps(content))
    if random.random() < 0.3:
        hurt(random, path)
    elif random.random() < 0.05:
        replaced_oddly(random, path)
    sizes = [
        "parallel.partition=null",
        "parallel.micro_batch_size=2",
        "parallel.global_batch_size=16",
        f"parallel.chunks={chunks}",
    ]
    return ["launch", "experiment=demo", *sizes, "parallel.schedule_file=mine.json", "dry_run=true"]


def _change(random: Random, content: Any) -> None:
    """One value of it, one action, or the order of two."""
    actions = content.get("actions")
    if random.random() < 0.3 or not isinstance(actions, list) or not actions:
        content[random.choice((*content, "actions", "more"))] = _value(random)
        return
    stage = random.choice(actions)
    if not isinstance(stage, list) or len(stage) < 2:
        actions[0] = _value(random)
        return
    place, other = random.sample(range(len(stage)), 2)
    match random.randrange(6):
        case 0:
            stage[place], stage[other] = stage[other], stage[place]
        case 1:
            stage.insert(other, stage[place])
        case 2:
            del stage[place]
        case 3:
            stage[place] = _value(random)
        case 4 if isinstance(stage[place], list) and stage[place]:
            stage[place] = [*stage[place]]
            stage[place][random.randrange(len(stage[place]))] = _value(random)
        case _:
            actions.append(stage)


def _value(random: Random) -> Any:
    """One of its own: it may be changed later."""
    return deepcopy(random.choice(VALUES))
