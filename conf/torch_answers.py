"""What torch alone can tell: a process of its own answers, since other commands import no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_ext.contract.files import read_regular, read_regular_text, user_cache, write_atomic
from megatron_ext.contract.models.hf_config import OLDEST

PROJECT = Path(__file__).resolve().parents[1]
RANKS = "megatron_ext"
"""The folder with all that computes."""
ERROR = "error"
"""The key of an answer that says what is wrong with the request."""
FAILED = "failed"
"""The key of what stands for an answer where the process gave none."""


def has_transformers() -> bool:
    """Whether the models of transformers can be made here."""
    major = (_version("transformers") or "").partition(".")[0]
    return _version("torch") is not None and major.isdigit() and int(major) >= OLDEST


def _version(package: str) -> str | None:
    """That of an installed package; else None."""
    from importlib.metadata import PackageNotFoundError, version  # takes as long as the rest of this module

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run(module: str, words: Sequence[str] = (), given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a module of this project with these words, and `given` as its standard input."""
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=False)


def answer(module: str, request: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """Returns what a module answers to a request, or `ERROR` or `FAILED` alone.

    Answers without either are kept in the user's cache. They are found again as long as the code of the ranks, torch
    and transformers are the same, and the `digest` of what the request names.
    """
    return json.loads(_answer(module, json.dumps(request, default=str, sort_keys=True), digest))


@lru_cache(maxsize=16)
def _answer(module: str, request: str, digest: str) -> str:
    key = hashlib.sha256(json.dumps([module, request, digest, _versions()]).encode()).hexdigest()
    kept = user_cache() / "answers" / f"{key}.json"
    try:
        return read_regular_text(kept)
    except (OSError, ValueError):  # nobody has asked for it before
        done = run(module, given=request)
    *_, last = ["", *done.stdout.strip().splitlines()]
    if not last.startswith("{"):
        why = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return json.dumps({FAILED: f"python -m {module} exited with {done.returncode}: {why[0]}"})
    if ERROR not in json.loads(last):
        with contextlib.suppress(OSError):
            kept.parent.mkdir(0o700, parents=True, exist_ok=True)
            write_atomic(kept, last)
    return last


def _versions() -> list[str]:
    """Those of all that decides an answer."""
    code = hashlib.sha256()
    for file in sorted((PROJECT / RANKS).rglob("*.py")):
        code.update(read_regular(file))
    return [code.hexdigest(), *(_version(package) or "" for package in ("torch", "transformers"))]
