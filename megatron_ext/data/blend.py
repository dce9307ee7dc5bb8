"""Several corpora as one: each gives its share of the samples, evenly mixed, as in Megatron's blended datasets."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.plan import Plan
from megatron_ext.data.indexed_dataset import data_file
from megatron_ext.data.map_places import find_or_build, load_map
from megatron_ext.data.samples import Samples, Split

if TYPE_CHECKING:
    from numpy.typing import NDArray

SURPLUS = 0.005
"""More samples than its share that are laid out of each corpus: Megatron's own margin, which the maps' names show."""
BLOCK = 1 << 16
Make = Callable[[Union[str, Path], Split], Samples]
"""From a corpus's prefix and a split to its samples."""


class BlendMaps(NamedTuple):
    """Sample k of the blend is sample `sample_idx[k]` of corpus `dataset_idx[k]`."""

    dataset_idx: NDArray[np.int16]
    sample_idx: NDArray[np.int64]


def normalized(weights: Sequence[float]) -> List[float]:
    """Weights that sum to 1, rounded as Megatron's are."""
    given = np.array(weights, np.float64)
    return (given / np.sum(given)).tolist()


def samples_of(share: float, samples: int) -> int:
    """How many samples are laid out of a corpus with this share of a blend."""
    return math.ceil(math.ceil(samples * share) * (1 + SURPLUS))


def compute(shares: Sequence[float], samples: int) -> BlendMaps:
    """The maps for `shares` that sum to 1: each sample comes from the corpus that is furthest behind its share.

    Which one that is depends on all before, so that this goes sample by sample: about a second for two million.
    """
    maps = BlendMaps(np.empty(samples, np.int16), np.empty(samples, np.int64))
    taken = [0] * len(shares)
    for first in range(0, samples, BLOCK):
        chosen, numbers = [], []
        for sample in range(first, min(first + BLOCK, samples)):
            place = max(sample, 1)
            behind = [share * place - count for share, count in zip(shares, taken)]
            corpus = behind.index(max(behind))
            chosen.append(corpus)
            numbers.append(taken[corpus])
            taken[corpus] += 1
        maps.dataset_idx[first : first + BLOCK] = chosen
        maps.sample_idx[first : first + BLOCK] = numbers
    return maps


def map_files(place: Union[str, Path], name: str, shares: Sequence[float], samples: int) -> List[Path]:
    """The two files of `BlendMaps`, named after the first corpus; they depend on the shares alone."""
    digest = hashlib.sha256(repr(list(shares)).encode()).hexdigest()[:12]
    stem = f"_{name}_blendmap_{samples}ns_{digest}_"
    return [data_file(place, f"{stem}{field}.npy") for field in BlendMaps._fields]


def build_or_load(
    prefix: Union[str, Path], name: str, shares: Sequence[float], samples: int, cache: Optional[str] = None
) -> BlendMaps:
    """The memory-mapped maps, built if they are not there; as `index_maps.build_or_load`. Raises DataError: the files
    cannot be written or read, or are not of these shares."""
    files = find_or_build(
        prefix, cache, lambda place: map_files(place, name, shares, samples), lambda: compute(shares, samples)
    )
    maps = BlendMaps(load_map(files[0]), load_map(files[1]))
    _check(maps, files, shares, samples)
    return maps


def _check(maps: BlendMaps, files: List[Path], shares: Sequence[float], samples: int) -> None:
    kinds = [(maps.dataset_idx.shape, maps.dataset_idx.dtype), (maps.sample_idx.shape, maps.sample_idx.dtype)]
    for (shape, dtype), file, expected in zip(kinds, files, ("int16", "int64")):
        if shape != (samples,) or dtype != expected:
            raise _misfit(file, f"{samples} numbers of {expected}")
    if int(maps.dataset_idx.min()) < 0 or int(maps.dataset_idx.max()) >= len(shares):
        raise _misfit(files[0], f"corpora 0 to {len(shares) - 1}")
    for corpus, share in enumerate(shares):
        numbers = maps.sample_idx[maps.dataset_idx == corpus]
        if abs(len(numbers) - share * samples) > len(shares):
            raise _misfit(files[0], f"about {share * samples:.0f} samples of corpus {corpus}")
        if bool(np.any(numbers != np.arange(len(numbers)))):
            raise _misfit(files[1], f"the samples of corpus {corpus} one after the other")


def _misfit(file: Path, expected: str) -> DataError:
    return DataError(
        f"{file}: this map of a blend was made for another blend, or is damaged: expected {expected}; delete it, it "
        "will be built anew"
    )


class BlendedSamples(Samples):
    """Samples of several corpora, in proportion to `weights`; `make` gives those of one.

    Raises:
        DataError: a corpus or its maps cannot be used.
    """

    def __init__(
        self, prefixes: Sequence[Union[str, Path]], weights: Sequence[float], split: Split, make: Make
    ) -> None:
        super().__init__(split.samples, split.name)
        shares = normalized(weights)
        self._corpora = [
            make(prefix, split._replace(samples=samples_of(share, split.samples)))
            for prefix, share in zip(prefixes, shares)
        ]
        self._maps = build_or_load(prefixes[0], split.name, shares, split.samples, split.cache)
        self.order: Dict[str, float] = {"corpora": len(shares)}
        for number, (corpus, share) in enumerate(zip(self._corpora, shares)):
            self.order[f"{number}.share"] = share
            self.order.update({f"{number}.{key}": value for key, value in corpus.order.items()})

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        return self._corpora[int(self._maps.dataset_idx[number])].sample(int(self._maps.sample_idx[number]))

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        corpora, samples = self._maps.dataset_idx[numbers], self._maps.sample_idx[numbers]
        each = [corpus.lengths(samples[corpora == place]) for place, corpus in enumerate(self._corpora)]
        found = np.empty((len(numbers), *each[0].shape[1:]), np.int64)
        for place, lengths in enumerate(each):
            found[corpora == place] = lengths
        return found


def samples_of_plan(plan: Plan, split: str, samples: int, make: Make) -> Samples:
    """`samples` samples of a split of all that a plan trains on; `make` gives those of one corpus. Raises DataError: a
    corpus or its maps cannot be used."""
    whole = Split(samples, plan.train.seed, tuple(plan.data_split), split, plan.data_cache)
    if not plan.data_blend:
        return make(plan.data_prefix, whole)
    prefixes: List[Union[str, Path]] = [corpus.prefix for corpus in plan.data_blend]
    return BlendedSamples(prefixes, [corpus.weight for corpus in plan.data_blend], whole, make)
