"""python -m benchmarks.gpu.altered WORD… PLAN NODE: the worker, altered as no plan can ask for.

`loss-part=N` takes the loss in parts of N logits, `same-images` gives every iteration the images of the first, which
lie on the GPU then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from megatron_ext import worker
from megatron_ext.engine.batches import BatchLoader
from megatron_ext.parallel import cross_entropy


def alter(word: str) -> None:
    name, _, value = word.partition("=")
    if name == "loss-part":
        vars(cross_entropy).update(PART=int(value), fuses=lambda device: False)
    elif name == "same-images":
        keep_first()
    else:
        raise SystemExit(f"{word}: is none of {__doc__}")


def keep_first() -> None:
    micros = BatchLoader.micros
    kept: dict[int, Any] = {}

    def first(self: BatchLoader, samples: Any, numbers: Any, keys: Sequence[int], coming: Any = ()) -> Any:
        if not kept:
            kept.update(enumerate(micros(self, samples, numbers, keys).values()))
        return {key: kept[place] for place, key in enumerate(keys)}

    BatchLoader.micros = first  # type: ignore[method-assign]


def main(words: Sequence[str]) -> int:
    for word in words[:-2]:
        alter(word)
    return worker.main([*words[-2:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
