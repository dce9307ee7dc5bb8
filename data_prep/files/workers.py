"""The same function on many items in several processes; the results come in the order of the items."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from data_prep.errors import DataPrepError

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 3
"""Items handed out for each worker: enough to keep it busy, few enough for memory to stay flat."""

_function: Callable[[Any], Any]


def in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R]:
    """`function` of each item, with at most `AHEAD` items a worker in memory.

    Where reading the items fails, the results of those before come first, so that what is reported does not depend on
    the number of workers. With one worker all is done in this process; for others `function` is pickled. Closing it
    ends the workers.

    Raises:
        DataPrepError: a worker was killed. What `function` and `items` raise is passed on.
    """
    if workers == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks, of the progress bar too
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(function,))
    source, failure = iter(items), None
    pending: deque[Future[R]] = deque()
    try:
        while True:
            while failure is None and len(pending) < workers * AHEAD:
                try:
                    item = next(source)
                except StopIteration:
                    break
                except DataPrepError as error:
                    failure = error
                    break
                pending.append(pool.submit(_run, item))
            if not pending:
                break
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataPrepError(
            f"one of {workers} processes was killed, perhaps because memory ran out; run the same command "
            "again with fewer --workers: it continues where it stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    if failure is not None:
        raise failure


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of so many items, the last one perhaps shorter."""
    found = iter(items)
    while batch := list(islice(found, size)):
        yield batch


def _begin(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the first of them ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for items forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(item: Any) -> Any:
    return _function(item)
