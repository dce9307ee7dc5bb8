"""What the profilers of IIDP and JABAS measured, as part of the project's profiles, and back: nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.profiles.steps import AllReduces, Host, Steps, StepTimes
from fasop.errors import SearchError
from fasop.shares.performance import BYTES_BY_IIDP
from fasop.shares.public_folders import Points, PublicFolders, PublicLimit, PublicStep
from fasop.shares.public_servers import PublicServer

LEAST_BYTES = 2**20
"""The smallest all-reduce that IIDP's profiler measures."""


def profiles_of(public: PublicFolders, source: str) -> dict[str, LayerProfile]:
    """A profile for each type of GPU, by its name in the files. Raises SearchError: there are no steps, or a host has
    two types of GPU."""
    gpus: dict[tuple[int, str], str] = {}
    for size, host, gpu in [
        *((size, host, step.gpu) for (_, size, host, _), step in public.steps.items()),
        *((size, host, limit.gpu) for (size, host), limit in public.limits.items()),
    ]:
        if gpus.setdefault((size, host), gpu) != gpu:
            raise SearchError(
                f"local batch size {size}, host {host}: there are files for {gpus[size, host]} and for {gpu}; keep "
                f"those of one"
            )
    if not public.steps:
        raise SearchError(f"{source}: no steps (*_comp_profile.json), so no GPU has a time")
    every: dict[str, list[Steps]] = {}
    for (size, host), gpu in sorted(gpus.items()):
        models: list[str | None] = [*sorted({model for model, *place, _ in public.steps if place == [size, host]})]
        limit = public.limits.get((size, host))
        for model in models or [None]:
            times = {
                workers: step
                for (name, *place, workers), step in public.steps.items()
                if (name, place) == (model, [size, host])
            }
            every.setdefault(gpu, []).append(
                Steps(
                    model=model,
                    host=host,
                    micro_batch_size=size,
                    most_workers=None if limit is None else limit.most_workers,
                    memory_bytes=None if limit is None else limit.memory_bytes,
                    times=[StepTimes(workers=workers, **times[workers].times) for workers in sorted(times)],
                )
            )
    all_reduces = {
        where: AllReduces(ideal_ms=[ideal for ideal, _ in points], measured_ms=[taken for _, taken in points])
        for where, points in public.all_reduces.items()
    }
    buckets = {model: [*sizes] for model, sizes in sorted(public.buckets.items())}
    hosts = {
        gpu: {
            name: Host(
                gpus=server.gpus,
                tflops=server.tflops,
                within_gbit_per_s=_gbit(server.within),
                between_gbit_per_s=_gbit(server.between),
            )
            for name, server in public.servers.items()
            if server.gpu == gpu
        }
        for gpu in every
    }
    return {
        gpu: LayerProfile(
            gpu=gpu, source=source, steps=steps, buckets_mib=buckets, all_reduces=all_reduces, hosts=hosts[gpu]
        )
        for gpu, steps in sorted(every.items())
    }


def public_of(profiles: Mapping[str, LayerProfile]) -> PublicFolders:
    """What profiles, by their names, keep of such files. Raises SearchError: one has none, or two of them say different
    things of the same."""
    found = PublicFolders()
    origin: dict[tuple[str, object], str] = {}

    def put(kind: str, key: object, value: object, name: str) -> None:
        first = origin.setdefault((kind, key), name)
        if getattr(found, kind).setdefault(key, value) != value:
            shown = "-".join(map(str, key)) if isinstance(key, tuple) else key
            raise SearchError(f"profiles {first} and {name} have different {kind.replace('_', ' ')} of {shown}")

    names = _names(profiles)
    for name, profile in profiles.items():
        if not profile.steps:
            raise SearchError(
                f"profile {name}: has no steps; measure them with 'tdpp profile streams=1,2 profile={name} add=true', "
                f"or read them with 'tdpp profile import=DIR profile=NAME'"
            )
        for steps in profile.steps:
            place = steps.micro_batch_size, steps.host
            if steps.most_workers is not None and steps.memory_bytes is not None:
                put("limits", place, PublicLimit(names[name], steps.memory_bytes, steps.most_workers), name)
            for times in steps.times:
                key = (str(steps.model), *place, times.workers)
                put("steps", key, PublicStep(str(steps.model), names[name], times.ms), name)
        for model, sizes in profile.buckets_mib.items():
            put("buckets", model, tuple(sizes), name)
        for where, reduced in profile.all_reduces.items():
            put("all_reduces", where, tuple(zip(reduced.ideal_ms, reduced.measured_ms, strict=True)), name)
    rates: dict[str, float] = {}
    for where in ("within", "between"):
        own = [(points, rate) for profile in profiles.values() for points, rate in _own_all_reduces(profile, where)]
        if own and where not in found.all_reduces:
            found.all_reduces[where], rates[where] = max(own, key=lambda one: one[0][-1][1])
    for name, profile in profiles.items():
        for host, about in profile.hosts.items():
            server = PublicServer(
                gpu=names[name],
                gpus=about.gpus,
                tflops=about.tflops,
                within=_bytes(about.within_gbit_per_s or rates.get("within")),
                between=_bytes(about.between_gbit_per_s or rates.get("between")),
            )
            put("servers", host, server, name)
    return found


def _names(profiles: Mapping[str, LayerProfile]) -> dict[str, str]:
    """Name GPUs as CUDA calls them where that is known, because the public tools compare with it."""
    return {
        name: profile.device if profile.device and "cuda" in profile.versions else profile.gpu
        for name, profile in profiles.items()
    }


def _gbit(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else bytes_per_s * 8 / 1e9


def _bytes(gbit_per_s: float | None) -> float | None:
    return None if gbit_per_s is None else round(gbit_per_s * 1e9 / 8)


def _own_all_reduces(profile: LayerProfile, where: str) -> Iterator[tuple[Points, float]]:
    """All-reduces that the project measured, as ideal and measured milliseconds, and Gbit/s: ideal at the bandwidth
    that they had, by IIDP's formula."""
    measured = (profile.within if where == "within" else profile.between).all_reduce
    if measured is None or where in profile.all_reduces or measured.ranks < 2:
        return
    per_ms = measured.gbit_per_s * 1e6 / 8
    factor = BYTES_BY_IIDP * (measured.ranks - 1) / measured.ranks
    yield (
        tuple(
            (factor * size / per_ms, microseconds / 1e3)
            for size, microseconds in sorted(measured.us_by_bytes.items())
            if size >= LEAST_BYTES
        ),
        measured.gbit_per_s,
    )
