"""Hosts that ssh reaches: how they are written, and what keeps a run from being started on them."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.executor import Host
from launch.control.executors import hosts
from launch.control.planning.dry_run import dry_run
from launch.errors import LaunchError
from launch.machine import ssh
from launch.machine.provenance import software

TWO = ["executor=hosts", "executor.hosts=[a:2,b:2]"]


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a:2", Host("a", 2)),
        ("10.0.0.7:16", Host("10.0.0.7", 16)),
        ("node-1.lab_x:1", Host("node-1.lab_x", 1)),
        ("a:gpu3", Host("a", 1, (3,))),
        ("a:gpu0+3+1", Host("a", 3, (0, 3, 1))),
    ],
)
def test_a_host_is_a_name_and_its_ranks(text: str, host: Host) -> None:
    assert Host.parse(text, "executor.hosts") == host


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("[]", r"executor\.kind=hosts needs executor\.hosts"),
        ("[a]", "'a' is not a host; write NAME:RANKS"),
        ("[me@a:2]", r"a user, a port or a key into ~/.ssh/config"),
        ("[-oProxyCommand:2]", "'-oProxyCommand:2' is not a host"),
        ("['a b:2']", "'a b:2' is not a host"),
        ("[a:0]", "a host runs 1 to 1024 ranks"),
        ("[a:gpu0+0]", "names a GPU twice"),
        ("[a:2,a:2]", "names a twice; give all its ranks at once, such as a:4"),
        ("[a:2]", r"4 ranks, but the chosen nodes .* have 2 GPUs; .*2 hosts \(executor.hosts\)"),
    ],
)
def test_what_is_no_host_is_one_message(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose(["executor=hosts", f"executor.hosts={given}"])


def test_a_node_order_says_of_which_group_each_host_is() -> None:
    own = ["cluster=a100x1_a10x7", "executor=hosts", "executor.hosts=[a:4,b:2,c:2]"]
    plan = ["parallel.data=2", "parallel.pipeline=4", "parallel.partition=1-1-1-1", "parallel.node_order=hgx+gpu2*2"]
    found = compose([*own, *plan])
    assert found.node_order.groups == ("hgx", "gpu2", "gpu2")
    assert found.ranks_per_node() == (4, 2, 2)
    with pytest.raises(ConfigError, match=r"has 3 hosts, but parallel\.node_order=hgx\+gpu2 has 2 nodes"):
        compose([*own, *plan[:-1], "parallel.node_order=hgx+gpu2"])


def test_a_tensor_group_lies_inside_a_host() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tensor=2 does not fit a host of 3 ranks"):
        own = ["executor=hosts", "executor.hosts=[a:3,b:1]", "parallel.tensor=2", "parallel.pipeline=1"]
        compose([*own, "parallel.data=2", "parallel.partition=null"])


FINE: dict[str, Any] = {"host": "x", **software()}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tdpp": "0"}, "b has a different version of tdpp's sources than this machine; check out the same commit"),
        ({"python": "3.9.1"}, rf"b has Python 3\.9\.1 at {sys.executable}, and this machine 3"),
        ({"torch": None}, "b has no torch in"),
        ({"torch": "1.0"}, r"b has torch 1\.0, and a .*; collectives hang between different versions"),
        ({"unix": 1000.0}, r"the clock of b is -\d+ s off this machine's, .* synchronise both"),
        ({"unix": 4e9}, r"the clock of b is \+\d+ s off this machine's"),
    ],
    ids=["sources", "python", "no torch", "torch", "slow clock", "fast clock"],
)
def test_hosts_that_differ_are_one_message(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], told: str) -> None:
    def call(host: str, _verb: str, _given: object) -> dict[str, Any]:
        return {"unix": time.time(), **FINE, **(changed if host == "b" else {})}

    monkeypatch.setattr(ssh, "call", call)
    with pytest.raises(LaunchError, match=f"executor.hosts: .*{told}"):
        hosts.look(compose(TWO))


def test_in_a_container_torch_is_the_image_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "call", lambda *_: {"unix": time.time(), **FINE, "torch": None})
    hosts.look(compose([*TWO, "container=docker"]))


def test_the_first_host_alone_is_asked_for_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def call(host: str, _verb: str, given: dict[str, Any]) -> dict[str, Any]:
        asked[host] = given["port"]
        return {"unix": time.time(), **FINE}

    monkeypatch.setattr(ssh, "call", call)
    hosts.look(compose([*TWO, "executor.master_port=22022"]))
    assert asked == {"a": 22022, "b": None}


def test_a_dry_run_shows_how_each_is_reached() -> None:
    text = dry_run(compose([*TWO[:1], "executor.hosts=[a:2,b:gpu0+3]"]), "worker").full()
    options = "-o BatchMode=yes -o StrictHostKeyChecking=yes"
    assert [f"    ssh -T -x {options} -o ConnectTimeout=15 -- {name} 'sh -c " in text for name in "ab"] == [True, True]
    assert " CUDA_VISIBLE_DEVICES=0,3 NODE_RANK=1 " in text


def test_the_lab_is_shown_without_a_host(tmp_path: Any) -> None:
    text = dry_run(compose(["experiment=nmt_lab", f"runs_dir={tmp_path}"]), "worker").full()
    assert text.count("docker run --rm") == 2
    assert " --gpus=all " in text
