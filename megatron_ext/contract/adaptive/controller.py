"""What is decided after an iteration: the next global batch, and how replicas share it. A pure state machine."""

from __future__ import annotations

import math
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from megatron_ext.contract.adaptive.config import (
    GAIN,
    GOODPUT,
    NONE,
    SIMILARITY,
    AdaptConfig,
    BatchRange,
    by_goodput,
    by_noise,
    by_similarity,
)
from megatron_ext.contract.adaptive.noise import Halves, Measurement, measurement, noise_scale, similarity, sought_batch
from megatron_ext.contract.adaptive.shares import (
    Measured,
    Replica,
    SlowestReplica,
    Times,
    Way,
    dealt,
    fastest,
    fastest_division,
    longest_of_division,
    overhead,
    rounds,
    ways_of,
)
from megatron_ext.contract.schedule.iteration import SampleDivision, several


class Decision(NamedTuple):
    """The shares of the iterations to come; those that there were, if nothing changes."""

    shares: Tuple[int, ...]
    """Micro-batches of each replica."""
    reason: str
    similarity: Optional[float] = None
    """That was measured, of several batches; None where it was not, or is not a number."""
    noise_scale: Optional[float] = None
    """In samples; also None where it is infinite."""
    sizes: Tuple[int, ...] = ()
    """Samples of a micro-batch, by replica; empty: of all what the plan says."""
    streams: Tuple[int, ...] = ()
    """Copies of the model, by replica; empty: what the plan says."""


class Controller:
    """Decides for one run. Whoever has the measurements, in a run or a simulation, asks it after every `config.every`
    iterations."""

    def __init__(
        self,
        config: AdaptConfig,
        micro_batch_size: int,
        reference: int,
        weights: Sequence[float],
        window: Sequence[Measurement] = (),
        streams: Sequence[int] = (),
        known: Sequence[Mapping[Way, float]] = (),
    ) -> None:
        """`reference` is the global batch that the learning rate was chosen for, in samples; `weights` are the shares
        that replicas have while nothing else is known, in proportion. `window` are measurements of an earlier start.
        `streams` are the plan's, by replica; empty: one each. `known` is what an earlier start measured, by replica:
        seconds of a round, by the way.

        Raises:
            ValueError: no batch fits the bounds.
        """
        self._config = config
        self._size = micro_batch_size
        self._reference = reference
        self._seconds: Sequence[float] = [1.0 / weight for weight in weights]
        self._batches = (
            None
            if config.rule == NONE
            else BatchRange.between(config.lower, config.upper, micro_batch_size, len(weights))
        )
        self._copies = tuple(streams) or (1,) * len(weights)
        ways = ways_of(config, micro_batch_size, self._copies)
        plain = all(of_replica == [Way(micro_batch_size)] for of_replica in ways)
        self._measured = None if plain else [Measured(of_replica) for of_replica in ways]
        for measured, of_replica in zip(self._measured or (), known):
            for way, seconds in of_replica.items():
                measured.note(way, seconds)
        self.window: List[Measurement] = list(window)
        """The newest measurements, as many as decisions take together."""
        self._timed: Tuple[Sequence[float], Sequence[float]] = (), ()
        self._longest: Optional[SlowestReplica] = None
        """The slowest replica for the seconds of micro-batches, and beside them, in `_timed`."""

    def decide(
        self,
        shares: Tuple[int, ...],
        halves: Optional[Halves] = None,
        times: Optional[Times] = None,
        sizes: Tuple[int, ...] = (),
        streams: Tuple[int, ...] = (),
    ) -> Decision:
        """`shares`, `sizes` and `streams` are those of the iterations since the last decision, of which `times` are."""
        found = None if halves is None else measurement(halves)
        if found is not None:
            self.window = [*self.window, found][-self._config.smoothing :]
        now = SampleDivision(shares, sizes or (self._size,) * len(shares), several(streams or self._copies))
        replicas = None
        if times is not None and self._rebalances(times):
            replicas = self._replicas(now, times)
        count, reason = self._next(now, times)
        known = {"similarity": _finite(similarity(self.window)), "noise_scale": _finite(noise_scale(self.window))}
        if not self.window:
            known = {}
        if count * self._size != now.samples:
            now = self._divided(replicas, count)
        elif replicas is not None and times is not None:
            now, balance = self._rebalanced(now, replicas, times)
            reason = "; ".join(part for part in (reason, balance) if part)
        sizes = () if {*now.sizes} == {self._size} else now.sizes
        streams = () if now.copies == self._copies else now.copies
        return Decision(now.shares, reason, sizes=sizes, streams=streams, **known)

    @property
    def batches(self) -> Optional[BatchRange]:
        """The batches that there are; None where the batch stays."""
        return self._batches

    @property
    def least_samples(self) -> int:
        """The fewest samples of a batch that may be."""
        count = len(self._seconds) if self._batches is None else self._batches.least
        return count * self._size

    def fitted(self, samples: int) -> Tuple[int, ...]:
        """The shares of about so many samples, before anything was measured."""
        return self._divided(None, max(len(self._seconds), round(samples / self._size))).shares

    def divided(self, samples: int) -> SampleDivision:
        """The fastest division of about so many samples by what earlier starts have measured, and by the first shares
        where they have not."""
        replicas, expected = None, [measured.expected() for measured in self._measured or ()]
        if any(expected):
            own = [Way(self._size, copies) for copies in self._copies]
            guessed = [{way: way.streams * took} for way, took in zip(own, self._seconds)]
            replicas = [Replica(found or guess) for found, guess in zip(expected, guessed)]
        return self._divided(replicas, max(len(self._seconds), round(samples / self._size)))

    def order(self, times: Optional[Times]) -> Iterator[int]:
        """Returns the order in which micro-batches of the plan's size are dealt, if `times` are always measured."""
        if times is not None and self._rebalances(times):
            return dealt(times.micro_batch_s, times.fixed_s)
        return dealt(self._seconds)

    def _rebalances(self, times: Times) -> bool:
        return self._config.rebalance and min(times.micro_batch_s) > 0.0

    def _next(self, now: SampleDivision, times: Optional[Times]) -> Tuple[int, str]:
        """Micro-batches of the plan's size that the next global batch has, and why."""
        config, count = self._config, now.samples // self._size
        if self._batches is None:
            return count, ""
        if len(self.window) < config.smoothing:
            return count, f"{len(self.window)} of {config.smoothing} measurements"
        if config.rule == SIMILARITY:
            found = similarity(self.window)
            return (
                by_similarity(count, found, config.target, config.rate, self._batches),
                f"similarity {found:.3f}, target {config.target:g}",
            )
        scale = noise_scale(self.window)
        known = f"noise scale {scale:.4g}" if math.isfinite(scale) else "no gradient above the noise"
        if config.rule == GOODPUT:
            if times is None:
                return count, f"{known}; no times"
            return self._by_goodput(now, scale, times), known
        sought = sought_batch(config.target, scale)
        return by_noise(count, scale, config.target, self._batches), f"{known}, wanted batch {sought:.4g}"

    def _by_goodput(self, now: SampleDivision, scale: float, times: Times) -> int:
        assert self._batches is not None
        rest = overhead(times, now.shares)
        own = [seconds * self._size / size for seconds, size in zip(times.micro_batch_s, now.sizes)]
        if self._longest is None or self._timed != (own, times.fixed_s):  # they are the same throughout a simulation
            self._timed = own, times.fixed_s
            order = dealt(own, times.fixed_s) if self._config.rebalance else dealt(self._seconds)
            self._longest = SlowestReplica(order, own, times.fixed_s)
        slowest = self._longest

        def seconds(counts: Sequence[int]) -> List[float]:
            return [found + rest for found in slowest.of(counts)]

        return by_goodput(now.samples // self._size, scale, self._reference, seconds, self._batches)

    def _replicas(self, now: SampleDivision, times: Times) -> List[Replica]:
        """What each takes, by what was measured."""
        seconds: Sequence[Dict[Way, float]] = [{Way(self._size): known} for known in times.micro_batch_s]
        if self._measured is not None:
            rows = zip(self._measured, *now[:2], now.copies, times.micro_batch_s)
            for measured, count, size, streams, known in rows:
                measured.note(Way(size, streams), known * count / rounds(count, streams))
            seconds = [measured.expected() for measured in self._measured]
        return [Replica(*known) for known in zip(seconds, times.fixed_s or [0.0] * len(seconds))]

    def _divided(self, replicas: Optional[Sequence[Replica]], count: int) -> SampleDivision:
        """The fastest division of so many micro-batches of the plan's size; None of `replicas`: by the first shares."""
        size, least = self._size, 1
        if replicas is not None and self._config.measures and len(replicas) == 1:
            least = 2  # for there are two halves
        if replicas is None and several(self._copies):
            ways = [Way(size, copies) for copies in self._copies]
            replicas = [Replica({way: way.streams * took}) for way, took in zip(ways, self._seconds)]
        if replicas is None:
            shares = fastest(self._seconds, count)
        elif self._measured is None:
            shares = fastest([of.seconds[Way(size)] for of in replicas], count, [of.fixed for of in replicas])
        else:
            found = fastest_division(replicas, count * size, least)
            assert found is not None, "micro-batches of the plan's size give every batch"
            return found
        return SampleDivision(shares, (size,) * len(shares), several(self._copies))

    def _rebalanced(self, now: SampleDivision, replicas: Sequence[Replica], times: Times) -> Tuple[SampleDivision, str]:
        """Shares the same global batch anew, where that is faster by the measured times; and why, in words."""
        better = self._divided(replicas, now.samples // self._size)
        rest = overhead(times, now.shares)
        before, after = longest_of_division(replicas, now) + rest, longest_of_division(replicas, better) + rest
        if before <= (1.0 + GAIN) * after:
            return now, "the shares fit the measured times"
        what = "other shares" if better.sizes == now.sizes else "other micro-batches"
        if better.streams != now.streams:
            what = "other streams" if better.sizes == now.sizes else f"{what} and streams"
        return better, f"{what}: {before * 1e3:.4g} -> {after * 1e3:.4g} ms expected"


def _finite(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None
