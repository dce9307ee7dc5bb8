"""Damaged run folders, and what looks at them."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import hurt, replaced_oddly
from tests.support.reports.synthetic import Shape, make_run

NAME = "tiny/20260101-000000-0123abcd"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, 1e300, -1e300, float("nan"), float("inf"), 2**31, 2**63, 10**30, 10**400),
    *(
        "",
        "0",
        "-1",
        "text",
        "\x1b]0;x\x07",
        "\u202e",
        "a\nb",
        "../../x",
        "0.0",
        "9" * 400,
        "</script><script>",
        "ended",
    ),
    *([], {}, [[]], [0], [None], ["x"], {"a": 1}, [{}], [1, 1], [-1], [[1]] * 50),
)
GPU = """2026-01-01T00:00:10+00:00 host: 1 GPU, reading 1, every 10 s
[0] NVIDIA A10       | 61'C,  97 % | 11468 / 22731 MB | 148 / 150 W | 52046(11449M) | GPU-5f1c0c6c
"""


def draw(random: Random, folder: Path) -> list[str]:
    for name in (NAME, "tiny/20260102-000000-4567abcd"):
        for path, content in files().items():
            (folder / "runs" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "runs" / name / path).write_bytes(content)
    run = folder / "runs" / NAME
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        damage(random, run)
    return [word.format(run=f"runs/{NAME}") for word in random.choice(COMMANDS).split()]


COMMANDS = (
    *("runs", "runs --json", "runs --verdict failed tiny", "status {run}", "status {run} --json", "status {run}"),
    *("logs {run}", "logs {run} --err --tail 3", "logs {run} --gpu", "logs {run} --agent", "logs {run} --node g0-0"),
    *("report {run}", "report {run} --trace --csv --output pages", "report runs/tiny --output pages", "report {run}"),
    *("stop {run}", "launch resume={run}", "launch train.load={run} dry_run=true", "search validate={run}"),
)


def damage(random: Random, run: Path) -> None:
    """One file, or now and then a folder."""
    if random.random() < 0.05:
        replaced_oddly(random, random.choice([path for path in sorted(run.iterdir()) if path.is_dir()] or [run / "x"]))
        return
    path = random.choice([path for path in sorted(run.rglob("*")) if path.is_file() and not path.is_symlink()])
    if path.stat().st_size > 1 << 20:
        return
    if path.suffix in (".json", ".jsonl", ".yaml") and random.random() < 0.7:
        text = path.read_text(errors="replace")
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        number = random.randrange(len(lines)) if lines else 0
        try:
            lines[number : number + 1] = [json.dumps(changed(random, json.loads(lines[number])))]
        except (ValueError, IndexError, RecursionError):
            lines.append("0")
        path.write_text("\n".join(lines) + "\n")
    else:
        hurt(random, path)


def changed(random: Random, value: Any) -> Any:
    """The same with another value somewhere in it, or a key that is gone or new."""
    if random.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return random.choice(VALUES)
    key = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
    match random.randrange(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, list):
            value.insert(key, random.choice((value[key], *VALUES)))
        case 1:
            value[random.choice(("", "x", "\x1b[2J", "version", "rank"))] = random.choice(VALUES)
        case _:
            value[key] = changed(random, value[key])
    return value


@cache
def files() -> dict[str, bytes]:
    """A run that has failed, with every file that a run can have, by path."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / NAME
        make_run(run, Shape(iterations=3, micro_batches=2, layers=2, ranks_per_node=1))
        plan = json.loads((run / "plan.json").read_text())
        plan["train"]["checkpoint"] = True
        told: dict[str, Any] = {
            "plan.json": plan,
            "jobs.json": {
                "token": "0" * 32,
                "executor": "local",
                "submission": 0,
                "jobs": [{"id": "123456", "nodes": [0, 1], "pid": 123456, "host": "elsewhere"}],
            },
            "stop.json": {"unix": 1_760_000_100.0, "user": "ada", "host": "elsewhere"},
            "launch.lock": {"user": "ada", "host": "elsewhere", "pid": 1, "unix": 1_760_000_000.0},
            "errors/rank-00001.json": {
                **{"rank": 1, "stage": 1, "dp": 0, "tp": 0, "node": plan["nodes"][1]["name"], "start": "0.0"},
                **{"unix": 1_760_000_050.0, "type": "RuntimeError", "message": "boom\nmore", "symptom": False},
                "traceback": "",
            },
        }
        for number, node in enumerate(plan["nodes"]):
            doing = {"does": "works", "what": "loss", "iteration": 2, "since_unix": 1_760_000_040.0, "process": "S"}
            told[f"nodes/{node['name']}.ranks.json"] = [
                {"rank": rank, "pid": 7, "exit_code": None, "ended_unix": None, "doing": doing}
                for rank in node["ranks"]
            ]
            told[f"nodes/{node['name']}.json"] = {
                **{"node": node["name"], "node_rank": number, "start": "0.0", "job": None, "host": "elsewhere"},
                **{"pid": 2**22 + number, "started_unix": 1_760_000_000.0, "state": "ended", "exit_code": number},
                **{"beat_unix": 1_760_000_060.0, "ended_unix": 1_760_000_060.0, "stopped": None, "stopped_unix": None},
                **{"doing": None, "reason": None, "withdrew": [], "out_begin": 0, "err_begin": 0},
            }
            (run / f"nodes/{node['name']}.out").write_text(
                "NODE_RANK: 0\nMODEL: tiny\n\n iteration 1/ 3 | lm loss: 1 |\n"
            )
            (run / f"nodes/{node['name']}.err").write_text("UserWarning: x\nRuntimeError: boom\nMemoryError\n")
            (run / f"nodes/{node['name']}.gpu").write_text(GPU * 3)
        for path, content in told.items():
            (run / path).write_text(json.dumps(content))
        (run / "checkpoints/latest").write_text("iter_0000002\n")
        (run / "checkpoints/iter_0000002").mkdir()
        (run / "checkpoints/iter_0000002/meta.json").write_text(json.dumps({"version": 2, "iteration": 2}))
        (run / "submitit").mkdir()
        (run / "submitit/123456_0_log.out").write_text("agent of node\n")
        (run / "submitit/123456_1_log.err").write_text("Traceback\nValueError: x\n")
        return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}
