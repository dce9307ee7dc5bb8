"""The fixture `fleet`: three hosts that only ssh reaches, up and with nothing running before each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.hosts.fleet import PACKAGES, Fleet, missing
from tests.support.ordinary_user import open_to_others
from tests.support.slurm import machines


@pytest.fixture(scope="session")
def hosts() -> Iterator[Fleet]:
    if lacking := missing():
        _do_without(f"{', '.join(lacking)} missing; install with: apt-get install {' '.join(PACKAGES)}")
    if not machines.may_isolate():
        _do_without("hosts of their own need root and the right to make namespaces")
    with open_to_others() as base:
        made = Fleet(base, ("a", "b", "c"))
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture
def fleet(hosts: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """ssh of the test reaches them. Afterwards nothing may be left on them."""
    monkeypatch.setenv("PATH", f"{hosts.bin}:{os.environ['PATH']}")
    yield hosts
    if left := hosts.clear():
        pytest.fail("the test left on the hosts: " + "\n".join(left))


def _do_without(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
