"""python -m tests.mutations.run [WORD]: makes one mistake after another in a copy of the project, and says which are
caught by the tests that are to catch them. With a WORD, those of files whose names contain it.

The exit code is 1 if one is not caught, or one of these tests fails without any. They run in processes that are forked
with the libraries imported, which takes longer than most tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import hydra
import hypothesis
import playwright.sync_api
import pytest
import torch

from tests.mutations.mutations import MUTATIONS, Mutation
from tests.support import ROOT

IMPORTED = (hydra, hypothesis, playwright, torch)
FAILED = 1
"""pytest's exit code if tests ran, and some failed."""
LIMIT_S = 900
"""A mistake by which a test never ends is caught, too."""
OWN = {"tests", "conf", "launch", "megatron_ext", "fasop", "reports", "data_prep", "tdpp", "benchmarks"}


class Job(NamedTuple):
    """Tests that run in a copy, of which a file has a mistake, or none has."""

    mutation: Mutation | None
    tests: Sequence[str]


class Run(NamedTuple):
    """A job that runs in a process."""

    job: Job
    copy: Path
    output: Path


def main(words: Sequence[str]) -> int:
    waiting = jobs([one for one in MUTATIONS if all(word in one.file for word in words)])[::-1]
    count, right = len(waiting), 0
    running: dict[int, Run] = {}
    with tempfile.TemporaryDirectory() as base:
        free = [copied(Path(base) / f"copy-{number}") for number in range(os.cpu_count() or 1)]
        while waiting or running:
            while waiting and free:
                run = Run(waiting.pop(), free.pop(), Path(base) / f"{len(waiting)}.txt")
                running[started(run)] = run
            pid, status = os.wait()
            run = running.pop(pid)
            right += is_right(run, os.waitstatus_to_exitcode(status))
            free.append(run.copy)
    print(f"{right} of {count} outcomes are right")
    return 0 if right == count else 1


def jobs(chosen: Sequence[Mutation]) -> list[Job]:
    """One for each mistake, and then the tests without any."""
    tests = sorted({one.test for one in chosen})
    files, single = ([test for test in tests if ("::" in test) == alone] for alone in (False, True))
    return [*(Job(one, [one.test]) for one in chosen), *(Job(None, some) for some in (files, single) if some)]


def copied(folder: Path) -> Path:
    """The files that git knows, in a folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def started(run: Run) -> int:
    """Makes the mistake, and forks a process that runs the tests: of a file those that are not slow."""
    one = run.job.mutation
    if one is not None:
        path = run.copy / one.file
        text, changed = path.read_text(), path.stat().st_mtime
        assert text.count(one.old) == 1, f"{one.file}: {one.old!r} occurs {text.count(one.old)} times"
        path.write_text(text.replace(one.old, one.new))
        os.utime(path, (changed + 10, changed + 10))  # Python has compiled nothing of that time
    quick = [] if "::" in run.job.tests[0] else ["-m", "not slow"]
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)
        code = 70
        try:
            output = os.open(run.output, os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
                del sys.modules[name]
            sys.path[:] = [str(run.copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
            os.chdir(run.copy)
            os.environ.update(PYTHONPATH=str(run.copy), CI="true", OMP_NUM_THREADS="1")
            code = pytest.main(["-x", "-p", "no:cacheprovider", "-W", "ignore", "--tb=line", *quick, *run.job.tests])
            sys.stdout.flush()
        finally:
            os._exit(code)
    return pid


def is_right(run: Run, code: int) -> bool:
    """Whether the tests fail with the mistake, or pass without; prints it, and mends the copy."""
    said, one = run.output.read_text(errors="replace"), run.job.mutation
    if one is None:
        print("the tests pass without a mistake" if code == 0 else f"FAIL WITHOUT A MISTAKE\n{said}", flush=True)
        return code == 0
    shutil.copy2(ROOT / one.file, run.copy / one.file)
    caught = code in (FAILED, -signal.SIGALRM)
    by = next((line for line in said.splitlines() if line.startswith("FAILED ")), said[-300:])
    words = f"{one.file}: {one.old.strip()!r} -> {one.new.strip()!r}"
    print(f"{'caught' if caught else 'MISSED'}  {words}\n        {by[:200] if caught else by}", flush=True)
    return caught


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
