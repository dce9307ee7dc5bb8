"""python -m megatron_ext.doctor PLAN.json NODE_RANK: looks at one node of a run, and at its ways to the others.

It trains nothing and judges nothing: what it finds goes to doctor/<node>.json and, by its ranks, to doctor/rank-*.json
in the run's folder (docs/formats.md). What needs nobody else comes first, so that a fault of one node hides nothing of
another, and every wait is bounded. It ends with 0 also when it found faults, and with 143 when it was told to stop; no
rank outlives it.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from megatron_ext.contract.cores import usable_cores
from megatron_ext.contract.errors import DataError, EngineError
from megatron_ext.contract.files import GrowingNote, read_note
from megatron_ext.contract.models.model import IMAGES, PAIRS, VIDEOS
from megatron_ext.contract.plan import Plan
from megatron_ext.data.map_places import place_to_write
from megatron_ext.parallel import interface

ALONE_S = 90.0
"""For what a rank does before it meets others; the first use of a GPU may take long."""
FINISH_S = 30.0
"""The same, once this process was told to stop, because others have failed: what it can still find is worth that."""
REACH_S = 5.0
"""For a connection to another node."""
TOGETHER_S = 120.0
"""For all that ranks do together."""
POLL_S = 0.05
_SHARED_MEMORY = Path("/dev/shm")
_OF_TEXT = (".bin", ".idx")
_SUFFIXES_OF = {
    PAIRS: tuple("-train.{}{}".format(side, suffix) for side in ("source", "target") for suffix in _OF_TEXT),
    IMAGES: (".json", "-train.images.npy", "-train.labels.npy"),
    VIDEOS: (
        *(".json", "-train.frames.npy", "-train.lengths.npy", "-train.videos.npy"),
        *("-train.captions.bin", "-train.captions.idx"),
    ),
}
"""What ranks read of data that have no index maps, by the model's family."""


_Place = Tuple[str, str]


class _Told:
    """Whether and when this process was told to stop."""

    def __init__(self) -> None:
        self.stop: Optional[float] = None
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def _note(self, _signum: int, _: Optional[FrameType]) -> None:
        self.stop = self.stop or time.monotonic()

    def wait(self, condition: Callable[[], bool], seconds: float, finish_s: float = 0.0) -> bool:
        """Whether the condition came true in time; `finish_s` is how long it may take once this was told to stop."""
        begun = time.monotonic()
        until = begun + seconds
        while not condition():
            if self.stop is not None:
                until = min(until, max(begun, self.stop) + finish_s)
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        return True


def main(argv: List[str]) -> int:
    """Looks at everything once; the exit code as in the module's docstring."""
    plan, node_rank = Plan.read(Path(argv[0])), int(argv[1])
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # nothing here could be saved
    told = _Told()
    node = plan.nodes[node_rank]
    path = plan.files.doctor_node(node.name)
    path.parent.mkdir(exist_ok=True)
    note = GrowingNote(
        path,
        host=socket.gethostname(),
        python=platform.python_version(),
        cpus=usable_cores(),
        files=dict(_files(plan)),
        maps=dict(_maps(plan)),
        disk=_free(plan.folder),
        shared_memory=_free(_SHARED_MEMORY),
    )
    _examine(plan, node_rank, note, told)
    return 0 if told.stop is None else 128 + signal.SIGTERM


def _examine(plan: Plan, node_rank: int, note: GrowingNote, told: _Told) -> None:
    paths = {node.name: plan.files.doctor_node(node.name) for node in plan.nodes}
    others = {node.name: paths[node.name] for rank, node in enumerate(plan.nodes) if rank != node_rank}
    with _Listener(len(plan.nodes), "nccl" if plan.device == "cuda" else "gloo") as listener:
        try:
            from megatron_ext.doctor.rank import Ranks
            from megatron_ext.timeline.surroundings import note_surroundings
        except (ImportError, OSError) as error:  # OSError: a library of torch's that cannot be loaded
            note.update(problem=f"torch cannot be used: {error}", **listener.told, ready=True)
            _reach(note, others, plan, told)
            note.update(exit_codes={})
            return
        note_surroundings(plan, node_rank)
        with Ranks(plan, node_rank) as ranks:
            told.wait(ranks.alone_done, ALONE_S, FINISH_S)
            problem = ranks.problem() or listener.problem
            note.update(problem=problem, **listener.told, ready=True)
            _reach(note, others, plan, told)
            if told.stop is None:
                ranks.go(_hindrance(paths))
                told.wait(ranks.ended, TOGETHER_S)
        note.update(exit_codes=ranks.exit_codes)


def _reach(note: GrowingNote, others: Mapping[str, Path], plan: Plan, told: _Told) -> None:
    """Connects to every other node once all are there, and tells which could not be reached.

    Returns when the others have told that, too, or cannot be expected to any more.
    """

    def all_have(key: str) -> bool:
        return all(key in _content(path) for path in others.values())

    told.wait(lambda: all_have("ready"), plan.meeting_timeout_s)
    found = {name: _content(path) for name, path in others.items()}
    addresses = {(name, key): content[key] for name, content in found.items() for key in _PLACES if content.get(key)}
    unreached = _connect(addresses)
    done = [name for name in others if "exit_codes" in _content(others[name])]
    # One that is done by now was there: it has told so before it stopped listening.
    of = {
        key: {name: why for (name, one), why in unreached.items() if one == key and name not in done} for key in _PLACES
    }
    note.update(unreached_messages=of["messages"], unreached=of["address"])
    told.wait(lambda: all_have("unreached"), 2 * REACH_S)


def _content(path: Path) -> Dict[str, Any]:
    return read_note(path) or {}


_PLACES = ("address", "messages")
"""Keys of a node's note: where its ranks meet others, and where the library of their messages listens."""


def _connect(addresses: Mapping[_Place, List[Any]]) -> Dict[_Place, str]:
    """Why a node cannot be reached, by its name and the kind of place; those that can be are left out."""
    unreached = dict.fromkeys(addresses, f"no answer within {REACH_S:g} s")

    def knock(name: _Place, address: Tuple[str, int]) -> None:
        try:
            socket.create_connection(address, REACH_S).close()
            del unreached[name]
        except socket.gaierror as error:
            unreached[name] = f"{address[0]}: {error.strerror}"
        except OSError as error:
            unreached[name] = error.strerror or str(error)

    threads = [Thread(target=knock, args=(name, (host, port)), daemon=True) for name, (host, port) in addresses.items()]
    for thread in threads:
        thread.start()
    until = time.monotonic() + REACH_S + 1.0
    for thread in threads:  # asking for a name's address has no limit of its own
        thread.join(max(0.0, until - time.monotonic()))
    return dict(unreached)


def _hindrance(paths: Mapping[str, Path]) -> str:
    """Why ranks need not even try to meet; empty if they should. All nodes come to the same conclusion."""
    found = {name: _content(path) for name, path in paths.items()}
    first = next(iter(found))
    for name, content in found.items():
        if "ready" not in content:
            return f"node {name} did not join"
        if content.get("problem"):
            return f"node {name}: {content['problem']}"
    for name, content in found.items():
        if first in content.get("unreached", {}):
            return f"node {name} cannot reach {first}, where ranks meet"
    return ""


def _files(plan: Plan) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """What training reads: the bytes of each file, a folder counting as 0, or why it cannot be read."""
    suffixes = _SUFFIXES_OF.get(plan.model.traits.learns, _OF_TEXT)
    files = [f"{prefix}{suffix}" for prefix in _prefixes(plan) for suffix in suffixes]
    for name in [*files, *filter(None, [plan.train.load])]:
        try:
            yield name, {"bytes": _read(Path(name))}
        except OSError as error:
            yield name, {"error": error.strerror}


def _maps(plan: Plan) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """Returns by the prefix of a corpus the folder where its index maps would be written, or why there is none."""
    for prefix in _prefixes(plan) if plan.model.traits.learns not in _SUFFIXES_OF else ():
        try:
            yield prefix, {"folder": str(place_to_write(prefix, plan.data_cache).parent)}
        except DataError as error:
            yield prefix, {"error": str(error)}


def _prefixes(plan: Plan) -> List[str]:
    return [corpus.prefix for corpus in plan.data_blend] or [plan.data_prefix]


def _read(path: Path) -> int:
    if path.is_dir():
        next(path.iterdir(), None)
        return 0
    with path.open("rb") as file:
        file.read(1)
        return file.seek(0, os.SEEK_END)


def _free(folder: Path) -> Optional[int]:
    """Bytes that this user may still write there; None if there is no such folder."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return min(state.f_bavail * state.f_frsize, 2**63 - 1)  # some file systems say more than there is


class _Listener:
    """A port that the other nodes connect to, on the address that ranks listen on; closed with the block."""

    def __init__(self, nodes: int, library: str) -> None:
        self.told: Dict[str, Any] = {}
        """What the note says of it: `address`, which others connect to, its `interface`; what the library of the ranks'
        messages takes (`taken`), and where others can try that (`messages`)."""
        self._of_library: Optional[socket.socket] = None
        self.problem: Optional[str] = None
        """Why there is none."""
        self._socket: Optional[socket.socket] = None
        try:
            host = interface.meeting_address(nodes)
        except EngineError as error:
            self.problem = str(error)
            return
        try:
            self._socket = interface.listen(host, 0)  # a connection is made without anybody accepting it
        except OSError as error:
            self.problem = f"ranks cannot listen on {host}, to which this node's name resolves: {error.strerror}"
            return
        self.told = {"address": [host, self._socket.getsockname()[1]], "interface": interface.name_of(host)}
        if nodes > 1:
            taken = interface.taken_by(library)
            self.told["taken"] = taken._asdict()
            if taken.address is not None and taken.interface != "lo":
                with suppress(OSError):
                    self._of_library = interface.listen(taken.address, 0)
                    self.told["messages"] = [taken.address, self._of_library.getsockname()[1]]

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._socket, self._of_library):
            if one is not None:
                one.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
