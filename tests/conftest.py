"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import settings
from playwright.sync_api import Browser, sync_playwright

from conf import compose, torch_answers
from conf.reading import own_folders
from conf.run_folder import run_folders
from tests.support import cases, composing, looking
from tests.support.reports.chromium import ARGUMENTS, CHROMIUM, INSTALL
from tests.support.slurm.login_node import OF_A_JOB

# A shell without job control has what it starts in the background ignore Ctrl-C, and with it all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A rank computes with one thread, and so does what it is compared with: with more, sums in fp16 have another order.
os.environ["OMP_NUM_THREADS"] = "1"

# Hundreds of processes import what stands here: each would compile it again where none may keep what it compiled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The tests may run in somebody's Slurm job, which is none of theirs.
for variable in [name for name in os.environ if name.startswith(OF_A_JOB)]:
    del os.environ[variable]

# Nor are the configurations of whoever runs them.
os.environ[own_folders.VARIABLE] = ""
os.environ.pop(run_folders.RUNS_DIR, None)

gc.disable()  # until all is collected

compose._composed = composing.composed
torch_answers.run = looking.forked

SLOW = {"slurm", "fleet", "browser", "engine_run", "runs"}
"""Fixtures."""


PARTS = 8
"""Parts of the slow tests; `make test` runs another one each day, and `make test-thorough` all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run all cases where else a few are drawn")
    parser.addoption(
        "--part",
        type=int,
        default=None,
        help=f"of the slow tests run one of {PARTS} parts, 0 to {PARTS - 1}; a test is always in the same part",
    )
    parser.addoption("--engine", default="tdpp", help="what trains in tests that any engine is to pass")


def pytest_configure(config: pytest.Config) -> None:
    cases.thorough = config.getoption("thorough")
    # A machine that does other things, too, makes a test slow, not wrong. A random failure prints what reproduces it on
    # any machine: Hypothesis keeps its database only where it ran.
    settings.register_profile("tests", max_examples=cases.fewer(40, 100), deadline=None, print_blob=True)
    settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Takes one worker more than there are cores: in many tests it waits for a launch, a clock or a page."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


def pytest_collection_finish() -> None:
    """What was collected stays to the end: no process, forked or not, looks through it for garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts a cluster, a browser or the processes of a whole run is slow, but for what `make test-fast` keeps."""
    for item in items:
        if SLOW & set(getattr(item, "fixturenames", ())) and not item.get_closest_marker("fast"):
            item.add_marker(pytest.mark.slow)
    part = config.getoption("part")
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        rare = item.get_closest_marker("thorough") is not None and not cases.thorough
        another = part is not None and _is_of_other_part(item, part % PARTS)
        (left_out if rare or another else kept).append(item)
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("first") is None)
    config.hook.pytest_deselected(items=left_out)


def _is_of_other_part(item: pytest.Item, part: int) -> bool:
    return item.get_closest_marker("slow") is not None and zlib.crc32(item.nodeid.encode()) % PARTS != part


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real one for all tests of a process, in which playwright starts but once."""
    if not CHROMIUM.exists():
        message = f"{CHROMIUM} is missing; install it with: {INSTALL}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()
