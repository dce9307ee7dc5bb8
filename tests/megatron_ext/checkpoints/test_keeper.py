"""The keepers of checkpoints in the memory of nodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoints import keeper as module
from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.header import digest_of, of_part
from megatron_ext.checkpoints.keeper import Memory
from megatron_ext.checkpoints.meta import Checkpoint, Meta
from megatron_ext.checkpoints.part_tensors import read_part
from megatron_ext.contract.errors import EngineError, PeerLost
from megatron_ext.contract.files import write_json
from megatron_ext.contract.kept import At, Keeper, KeeperLost, Kept, newest
from megatron_ext.contract.run_files import META, RunFiles
from megatron_ext.parallel import interface

SECRET = b"s" * 64
PARTS = ["embedding", "layer-00000"]


class Nodes:
    """Keepers of one run, in threads of this process."""

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.listening: dict[str, Any] = {}
        self.memory: dict[str, Memory] = {}
        run.nodes.mkdir()
        run.secret.write_bytes(SECRET)
        run.secret.chmod(0o600)

    def start(self, node: str, submission: int = 0, secret: bytes = SECRET) -> None:
        memory = self.memory[node] = Memory()
        listening = self.listening[node] = interface.listen("127.0.0.1", 0)
        host, port = listening.getsockname()
        write_json(self.run.keeper(node), {"submission": submission, "host": host, "port": port, "pid": 1})

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=module.serve, args=(connection, secret, memory), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def end(self, node: str) -> None:
        if self.listening[node].fileno() >= 0:
            self.listening[node].shutdown(2)
        self.listening[node].close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    found = Nodes(RunFiles(tmp_path))
    yield found
    for node in found.listening:
        found.end(node)


def tensors(part: str, at: At) -> dict[str, torch.Tensor]:
    return {"weights/w": torch.full((3, 2), float(at.iteration + len(part)))}


def put(nodes: Nodes, node: str, at: At, *parts: str, keep: At | None = None) -> int:
    with Keeper(nodes.run, node, at.start) as keeper:
        for part in parts:
            if part == META:
                content = [meta(at)]
                held = keeper.put(at, META, "", content, keep)
            else:
                content = safetensors.encoded(tensors(part, at), of_part(part, at.iteration))
                held = keeper.put(at, part, digest_of(bytes(content[0])), content, keep)
    return held


def meta(at: At) -> bytes:
    one = Meta(at.iteration, 4, 1, scaler=None, order=None, model={"family": "gpt"})
    return json.dumps({**asdict(one), "parts": PARTS}).encode()


def found(nodes: Nodes, *asked: str, start: str = "0.1") -> Kept | None:
    return newest(nodes.run, asked, start)


def test_a_checkpoint_is_complete_where_the_nodes_that_answer_have_all_parts_of_it(nodes: Nodes) -> None:
    for node in ("a", "b", "c"):
        nodes.start(node)
    put(nodes, "a", At("0.0", 10), META, "embedding")
    put(nodes, "b", At("0.0", 10), META, "embedding", "layer-00000")
    put(nodes, "c", At("0.0", 10), "layer-00000")
    for asked in (("a", "b", "c"), ("a", "c"), ("b",)):
        kept = found(nodes, *asked)
        assert kept is not None, asked
        assert kept.at == At("0.0", 10)
    assert found(nodes, "a") is None
    assert found(nodes, "c") is None
    nodes.end("b")
    kept = found(nodes, "a", "b", "c", "never-came")
    assert kept is not None
    assert kept.holders["layer-00000"] == ["c"]
    checkpoint = Checkpoint.in_memory(Kept.of(kept.as_json(), nodes.run))
    assert checkpoint.position.iteration == 10
    for part in PARTS:
        assert torch.equal(read_part(checkpoint, part)["weights/w"], tensors(part, kept.at)["weights/w"])


def test_parts_of_two_starts_are_not_put_together(nodes: Nodes) -> None:
    """The same iteration of another start may have been trained in another layout."""
    nodes.start("a")
    nodes.start("b")
    put(nodes, "a", At("0.0", 10), META, "embedding")
    put(nodes, "b", At("0.1", 10), "layer-00000")
    assert found(nodes, "a", "b") is None


def test_a_node_holds_the_newest_complete_one_and_the_one_being_saved(nodes: Nodes) -> None:
    nodes.start("a")
    one = put(nodes, "a", At("0.0", 10), META, *PARTS)
    assert put(nodes, "a", At("0.0", 20), "embedding", keep=At("0.0", 10)) < 2 * one
    kept = found(nodes, "a")
    assert kept is not None
    assert kept.at.iteration == 10
    assert put(nodes, "a", At("0.0", 20), META, "layer-00000", keep=At("0.0", 10)) == pytest.approx(2 * one, rel=0.05)
    kept = found(nodes, "a")
    assert kept is not None
    assert kept.at.iteration == 20
    put(nodes, "a", At("0.0", 30), "embedding", keep=At("0.0", 20))
    assert [At(*each["at"]) for each in nodes.memory["a"].listed()] == [At("0.0", 20), At("0.0", 30)]
    put(nodes, "a", At("0.1", 12), META, *PARTS)  # a later start that went on from the disk
    assert [At(*each["at"]) for each in nodes.memory["a"].listed()] == [At("0.1", 12)]


def test_what_a_lost_rank_still_sends_does_not_replace_what_the_next_start_saved(nodes: Nodes) -> None:
    nodes.start("a")
    put(nodes, "a", At("0.1", 10), META, *PARTS)
    with pytest.raises(KeeperLost, match=r"a later checkpoint than iteration 90 of start 0\.0"):
        put(nodes, "a", At("0.0", 90), "embedding")
    assert found(nodes, "a") is not None


def test_what_does_not_fit_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.start("a")
    monkeypatch.setattr(module, "machine_memory", lambda: (10**9, 50_000_010))
    with pytest.raises(KeeperLost, match="do not fit into its memory, of which 50,000,010 bytes are free"):
        put(nodes, "a", At("0.0", 10), "embedding")


def test_strangers_and_other_submissions_get_nothing(nodes: Nodes) -> None:
    nodes.start("a", secret=b"x" * 64)
    nodes.start("b", submission=1)
    with pytest.raises(KeeperLost, match="node a does not keep checkpoints: "):
        Keeper(nodes.run, "a", "0.0")
    with pytest.raises(KeeperLost, match="another submission"):
        Keeper(nodes.run, "b", "0.0")
    assert found(nodes, "a", "b") is None


def test_parts_that_are_gone_or_damaged_are_not_loaded(nodes: Nodes) -> None:
    nodes.start("a")
    put(nodes, "a", At("0.0", 10), META, *PARTS)
    kept = found(nodes, "a")
    assert kept is not None
    checkpoint = Checkpoint.in_memory(kept)
    content = nodes.memory["a"].get(kept.at, "embedding")
    assert content is not None
    content[-1] ^= 1
    with pytest.raises(EngineError, match="damaged: expected the CRC-32"):
        read_part(checkpoint, "embedding")
    nodes.end("a")
    with pytest.raises(PeerLost, match="layer-00000 of iteration 10 was in the memory of a; node a"):
        read_part(checkpoint, "layer-00000")
