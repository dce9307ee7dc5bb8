"""Latency and bandwidth from times by message size."""

from __future__ import annotations

from collections.abc import Mapping

from fasop.costs.profiles.profile import LinkTimes
from launch.errors import LaunchError

FASTEST = 8e-12
"""Microseconds a byte: no cluster takes a bandwidth beyond this."""


def p2p_times(us_by_bytes: Mapping[int, float], sharing: int) -> LinkTimes:
    """Returns the times of messages one way, while `sharing` pairs used the link at once."""
    latency_us, us_per_byte = fit(us_by_bytes)
    return _times(us_by_bytes, latency_us, us_per_byte / sharing, ranks=2)


def all_reduce_times(us_by_bytes: Mapping[int, float], ranks: int, sharing: int) -> LinkTimes:
    """Returns the times of all-reduces: each link of a ring has 2 (n - 1) messages of an n-th of the bytes in turn."""
    latency_us, us_per_byte = fit(us_by_bytes)
    steps = 2 * (ranks - 1)
    return _times(us_by_bytes, latency_us / steps, us_per_byte * ranks / steps / sharing, ranks=ranks)


def fit(us_by_bytes: Mapping[int, float]) -> tuple[float, float]:
    """Latency in us and us per byte, of which the line is nearest to all times (least squares of relative errors).

    Relative errors let small messages decide the latency and large ones the bandwidth.

    Raises:
        LaunchError: times do not grow with the size.
    """
    weights = {size: us**-2 for size, us in us_by_bytes.items()}
    w, ws, wss = (sum(weight * size**power for size, weight in weights.items()) for power in (0, 1, 2))
    wt, wst = (sum(weights[size] * size**power * us for size, us in us_by_bytes.items()) for power in (0, 1))
    determinant = w * wss - ws * ws
    latency, slope = (wt * wss - ws * wst) / determinant, (w * wst - ws * wt) / determinant
    if latency < 0:
        latency, slope = 0.0, wst / wss
    if slope <= FASTEST:
        times = ", ".join(f"{size} bytes {us:.1f} us" for size, us in us_by_bytes.items())
        raise LaunchError(f"large messages did not take longer than small ones ({times}); measure again on idle nodes")
    return latency, slope


def _times(us_by_bytes: Mapping[int, float], latency_us: float, us_per_byte: float, ranks: int) -> LinkTimes:
    return LinkTimes(
        latency_us=rounded(latency_us),
        gbit_per_s=rounded(8e-3 / us_per_byte),
        ranks=ranks,
        us_by_bytes={size: rounded(us) for size, us in us_by_bytes.items()},
    )


def rounded(value: float) -> float:
    """Rounds to four digits: no measurement here is better."""
    return float(f"{value:.4g}")
