"""Checkpoints in the memory of a run's nodes (`train.save_memory`), as ranks and agents ask for them.

Each node of an elastic run has a keeper, a child of its agent (`checkpoints/keeper.py`), which holds parts of
checkpoints as the bytes of their files. A rank gives each of its parts to the keeper of its node and to that of the
next node, so that any one node can be lost. Rank 0 gives `meta.json` away in the same manner: a checkpoint is complete
if the keepers that answer have that and all parts that it names, of the same start and iteration.
"""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from megatron_ext.contract.errors import EngineError, PeerLost
from megatron_ext.contract.files import read_regular
from megatron_ext.contract.handshake import exactly, prove, read_secret, receive, send
from megatron_ext.contract.run_files import RunFiles

GREETING = b"tdpp keeper 1\n"
ANSWER_S = 3.0
"""A keeper that does not answer for so long is lost, or its node is."""
TRANSFER_S = 60.0
"""The same while the bytes of a part travel, between two of them."""
_AT_ONCE = 32


class At(NamedTuple):
    """Which checkpoint: the same iteration of another start may have been trained in another layout."""

    start: str
    iteration: int

    @property
    def order(self) -> List[int]:
        """Later ones are greater."""
        return [*map(int, self.start.split(".")), self.iteration]


@dataclass(frozen=True)
class Kept:
    """A complete checkpoint in the memory of nodes."""

    run: RunFiles
    at: At
    meta: Mapping[str, Any]
    """meta.json, but for `parts`."""
    parts: Dict[str, str]
    """For each part, the digest of its file's header."""
    holders: Dict[str, List[str]] = field(default_factory=dict)
    """For each part, the nodes that have it."""

    def as_json(self) -> Any:
        return {**asdict(self), "run": None}

    @classmethod
    def of(cls, content: Any, run: RunFiles) -> Kept:
        return cls(**{**content, "run": run, "at": At(*content["at"])})

    def read(self, part: str) -> bytearray:
        """The bytes of a part, from one of its nodes. Raises PeerLost: none of them answers any more."""
        nodes = self.holders[part]
        why = ""
        for node in random.sample(nodes, len(nodes)):  # not all ranks from the first one
            try:
                with Keeper(self.run, node, self.at.start) as keeper:
                    return keeper.get(self.at, part)
            except KeeperLost as error:
                why = f"{why}; {error}"
        raise PeerLost(f"{part} of iteration {self.at.iteration} was in the memory of {', '.join(nodes)}{why}")


class KeeperLost(OSError):
    """A node's keeper cannot be reached, or does not do what was asked."""


class Keeper:
    """A connection to the keeper of a node."""

    def __init__(self, run: RunFiles, node: str, start: str) -> None:
        """Connects to the keeper of this submission. Raises KeeperLost: there is none."""
        self._node = node
        self._socket: Optional[socket.socket] = None
        try:
            record = json.loads(read_regular(run.keeper(node)))
            if str(record["submission"]) != start.partition(".")[0]:
                raise KeeperLost("its keeper is that of another submission")
            self._socket = socket.create_connection((record["host"], record["port"]), timeout=ANSWER_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove(self._socket, read_secret(run.path), GREETING)
            self._socket.settimeout(TRANSFER_S)
        except (EngineError, OSError, EOFError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise KeeperLost(f"node {node} does not keep checkpoints: {error}") from error

    def held(self) -> List[Dict[str, Any]]:
        """The checkpoints of which it has parts: start, iteration, meta, and the digests of the parts."""
        return self._ask({"do": "list"})

    def put(self, at: At, part: str, digest: str, content: Sequence[Any], keep: Optional[At]) -> int:
        """Gives it a part, in pieces, and has it forget all checkpoints but this one and `keep`; returns the bytes that
        it holds now."""
        size = sum(len(piece) for piece in content)
        self._ask({"do": "put", "at": at, "part": part, "digest": digest, "bytes": size, "keep": keep})
        try:
            for piece in content:
                self._open.sendall(piece)
        except OSError as error:
            raise KeeperLost(f"node {self._node}: {error}") from error
        return int(self._answer())

    def get(self, at: At, part: str) -> bytearray:
        """The bytes of a part."""
        size = int(self._ask({"do": "get", "at": at, "part": part}))
        try:
            return exactly(self._open, size)
        except (OSError, EOFError) as error:
            raise KeeperLost(f"node {self._node}: {error}") from error

    def _ask(self, request: Dict[str, Any]) -> Any:
        try:
            send(self._open, request)
        except OSError as error:
            raise KeeperLost(f"node {self._node}: {error}") from error
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = receive(self._open)
        except (OSError, EOFError, ValueError) as error:
            raise KeeperLost(f"node {self._node}: {error}") from error
        if "error" in answer:
            raise KeeperLost(f"node {self._node}: {answer['error']}")
        return answer["answer"]

    @property
    def _open(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def newest(run: RunFiles, nodes: Sequence[str], start: str) -> Optional[Kept]:
    """The checkpoint of the highest iteration that the keepers of these nodes have the whole of. `start` is one of the
    submission whose keepers are asked; those that do not answer have nothing."""
    if not nodes:
        return None

    def held(node: str) -> List[Dict[str, Any]]:
        with suppress(KeeperLost), Keeper(run, node, start) as keeper:
            return keeper.held()
        return []

    with ThreadPoolExecutor(min(len(nodes), _AT_ONCE)) as pool:
        answers = dict(zip(nodes, pool.map(held, nodes)))
    return max(_complete(run, answers), key=lambda one: (one.at.iteration, one.at.order), default=None)


def _complete(run: RunFiles, answers: Mapping[str, List[Dict[str, Any]]]) -> Iterator[Kept]:
    metas: Dict[At, Any] = {}
    parts: Dict[At, Dict[str, str]] = {}
    holders: Dict[At, Dict[str, List[str]]] = {}
    for node, held in answers.items():
        for one in held:
            at = At(*one["at"])
            metas.setdefault(at, one["meta"])
            if one["meta"] is not None:
                metas[at] = one["meta"]
            for part, digest in one["parts"].items():
                if parts.setdefault(at, {}).setdefault(part, digest) == digest:
                    holders.setdefault(at, {}).setdefault(part, []).append(node)
    for at, meta in metas.items():
        if meta is not None and set(meta["parts"]) <= parts.get(at, {}).keys():
            digests = {part: parts[at][part] for part in meta["parts"]}
            yield Kept(run, at, {**meta, "parts": None}, digests, holders[at])
