"""What is decided after an iteration: the next global batch, and how replicas share it. A pure state machine."""

from __future__ import annotations

import math
from typing import List, NamedTuple, Optional, Sequence, Tuple

from megatron_ext.contract.adaptive.config import GOODPUT, NONE, SIMILARITY, AdaptConfig
from megatron_ext.contract.adaptive.noise import Halves, Measurement, measurement, noise_scale, similarity, sought_batch
from megatron_ext.contract.adaptive.rules import GAIN, Rungs, by_goodput, by_noise, by_similarity
from megatron_ext.contract.adaptive.shares import Times, fastest, longest, overhead


class Decision(NamedTuple):
    """The shares of the iterations to come; those that there were, if nothing changes."""

    shares: Tuple[int, ...]
    """Micro-batches of each replica."""
    reason: str
    similarity: Optional[float] = None
    """That was measured, of several batches; None where it was not, or is not a number."""
    noise_scale: Optional[float] = None
    """In samples; also None where it is infinite."""


class Controller:
    """Of one run; whoever has the measurements, in a run or a simulation, asks it after every `config.every`
    iterations."""

    def __init__(
        self,
        config: AdaptConfig,
        micro_batch_size: int,
        reference: int,
        weights: Sequence[float],
        window: Sequence[Measurement] = (),
    ) -> None:
        """`reference` is the global batch that the learning rate was chosen for, in samples; `weights` are the shares
        that replicas have while nothing else is known, in proportion. `window` are measurements of an earlier start.

        Raises:
            ValueError: no batch fits the bounds.
        """
        self._config = config
        self._size = micro_batch_size
        self._reference = reference
        self._seconds: Sequence[float] = [1.0 / weight for weight in weights]
        self._rungs = (
            None if config.rule == NONE else Rungs.between(config.lower, config.upper, micro_batch_size, len(weights))
        )
        self.window: List[Measurement] = list(window)
        """The newest measurements, as many as decisions take together."""

    def decide(
        self, shares: Tuple[int, ...], halves: Optional[Halves] = None, times: Optional[Times] = None
    ) -> Decision:
        """`shares` are those of the iterations since the last decision, of which `times` are."""
        self._note(halves)
        seconds = self._seconds
        if times is not None and self._config.rebalance and min(times.micro_batch_s) > 0.0:
            seconds = times.micro_batch_s
        count, reason = self._next(shares, times)
        known = {"similarity": _finite(similarity(self.window)), "noise_scale": _finite(noise_scale(self.window))}
        if not self.window:
            known = {}
        if count == sum(shares):
            shares, balance = self._rebalanced(shares, seconds, times)
            reason = "; ".join(part for part in (reason, balance) if part)
        else:
            shares = fastest(seconds, count)
        return Decision(shares, reason, **known)

    @property
    def least_samples(self) -> int:
        """Of a batch that may be."""
        count = len(self._seconds) if self._rungs is None else self._rungs.least
        return count * self._size

    def fitted(self, samples: int) -> Tuple[int, ...]:
        """The shares of about so many samples, before anything was measured."""
        return fastest(self._seconds, max(len(self._seconds), round(samples / self._size)))

    def _note(self, halves: Optional[Halves]) -> None:
        found = None if halves is None else measurement(halves)
        if found is not None:
            self.window = [*self.window, found][-self._config.smoothing :]

    def _next(self, shares: Sequence[int], times: Optional[Times]) -> Tuple[int, str]:
        """Micro-batches of the next global batch, and why."""
        config, count = self._config, sum(shares)
        if self._rungs is None:
            return count, ""
        if len(self.window) < config.smoothing:
            return count, f"{len(self.window)} of {config.smoothing} measurements"
        if config.rule == SIMILARITY:
            found = similarity(self.window)
            return (
                by_similarity(count, found, config.target, config.rate, self._rungs),
                f"similarity {found:.3f}, target {config.target:g}",
            )
        scale = noise_scale(self.window)
        known = f"noise scale {scale:.4g}" if math.isfinite(scale) else "no gradient above the noise"
        if config.rule == GOODPUT:
            if times is None:
                return count, f"{known}; no times"
            return self._by_goodput(shares, scale, times), known
        sought = sought_batch(config.target, scale)
        return by_noise(count, scale, config.target, self._rungs), f"{known}, sought batch {sought:.4g}"

    def _by_goodput(self, shares: Sequence[int], scale: float, times: Times) -> int:
        assert self._rungs is not None
        rest = overhead(times, shares)
        split = times.micro_batch_s if self._config.rebalance else self._seconds

        def seconds(count: int) -> float:
            return longest(times.micro_batch_s, fastest(split, count)) + rest

        return by_goodput(sum(shares), scale, self._reference, seconds, self._rungs)

    def _rebalanced(
        self, shares: Tuple[int, ...], seconds: Sequence[float], times: Optional[Times]
    ) -> Tuple[Tuple[int, ...], str]:
        """At a constant batch."""
        if times is None or seconds is not times.micro_batch_s:
            return shares, ""
        better = fastest(seconds, sum(shares))
        rest = overhead(times, shares)
        before, after = longest(seconds, shares) + rest, longest(seconds, better) + rest
        if before <= (1.0 + GAIN) * after:
            return shares, "the shares fit the measured times"
        return better, f"other shares: {before * 1e3:.4g} -> {after * 1e3:.4g} ms expected"


def _finite(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None
