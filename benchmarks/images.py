"""python -m benchmarks.images: images per second that a rank gets, alone and with helpers that prepare them ahead.

Parts of two photographs, which scikit-learn brings, of 224 x 224 pixels, with RandAugment, mirroring, erasing and
mixing as a ResNet-50 or a ViT is trained. Alone the rank prepares them one after another when an iteration begins; with
helpers (`megatron_ext.data.ahead`) it computes meanwhile, here a GPU of the given speed, for which it sleeps. Both have
the same pixels, or the benchmark stops.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan_parts import Augment
from megatron_ext.data.ahead import Ahead
from megatron_ext.data.samples import Split
from megatron_ext.data.vision.images import ImageSamples

SIZE, MICRO_BATCH, MICRO_BATCHES = 224, 16, 2
ROUNDS = 3
PICTURES = 64
CHANGES = Augment(padding=0, flip=True, rand_augment=2, rand_augment_magnitude=9.0, erasing=0.25, mixup=0.8, cutmix=1.0)
MODEL = ModelConfig(
    layers=1, hidden=8, heads=1, sequence_length=0, vocab_size=0, padded_vocab_size=0, family="vit", image_size=SIZE,
    channels=3, classes=2, patch_size=16,
)  # fmt: skip


def photographs(prefix: Path, count: int, size: int = SIZE) -> None:
    """Writes data of so many parts of photographs, mirrored or not; their class is the photograph."""
    from sklearn.datasets import load_sample_images  # type: ignore[import-untyped]

    photos, random = load_sample_images().images, np.random.default_rng(0)
    pixels = np.empty((count, size, size, 3), np.uint8)
    labels = np.arange(count) % len(photos)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        photo = photos[label]
        top, left = (random.integers(length - size + 1) for length in photo.shape[:2])
        image[:] = photo[top : top + size, left : left + size, :: random.choice([1, -1])]
    flat = pixels.reshape(-1, 3) / 255.0
    for split in ("train", "valid", "test"):
        np.save(f"{prefix}-{split}.images.npy", pixels if split == "train" else pixels[:2])
        np.save(f"{prefix}-{split}.labels.npy", labels if split == "train" else labels[:2])
    manifest = {
        **{"version": 1, "kind": "images", "classes": [str(number) for number in range(len(photos))]},
        **{"height": size, "width": size, "channels": 3, "made_by": "benchmarks.images"},
        **{"mean": flat.mean(0).tolist(), "std": flat.std(0).tolist()},
        "splits": {split: {"images": count if split == "train" else 2} for split in ("train", "valid", "test")},
    }
    Path(f"{prefix}.json").write_text(json.dumps(manifest))


def iterations() -> Iterator[np.ndarray]:
    per = MICRO_BATCHES * MICRO_BATCH
    return (first + np.arange(per).reshape(MICRO_BATCHES, MICRO_BATCH) for first in count(0, per))


def cpu_s(pids: list[int]) -> float:
    """Returns those of this process and these."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return own.ru_utime + own.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def fed(samples: ImageSamples, helpers: int, compute_s: float, rounds: int) -> tuple[dict[str, float], list[int]]:
    """Measures iterations without the first two: images per second, the wait for them, CPU ms an image; and
    checksums."""
    ahead = Ahead(helpers, torch.device("cpu"))
    sums: list[int] = []
    waits: list[float] = []
    begun, used = 0.0, 0.0
    pids: list[int] = []
    taken = iterations()
    for number in range(rounds + 2):
        numbers = next(taken)
        if number == 2:
            pids = [helper._pid for helper in ahead._helpers]
            begun, used, waits = time.perf_counter(), cpu_s(pids), []
        before = time.perf_counter()
        if helpers:
            start = int(numbers.max()) + 1
            following = (start + step * MICRO_BATCH + np.arange(MICRO_BATCH) for step in count())
            held = list(ahead.take(samples, numbers, following))
        else:
            held = [{name: torch.from_numpy(one) for name, one in samples.batch(row).items()} for row in numbers]
        waits.append(time.perf_counter() - before)
        time.sleep(compute_s)
        sums += [int(one["images"].view(torch.int32).long().sum()) for one in held]
    images = rounds * MICRO_BATCHES * MICRO_BATCH
    found = {
        "images_per_s": images / (time.perf_counter() - begun),
        "wait_ms": 1e3 * statistics.median(waits),
        "cpu_ms_an_image": 1e3 * (cpu_s(pids) - used) / images,
    }
    ahead.close()
    return found, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--helpers", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--compute-ms", type=float, nargs="+", default=[0.0, 80.0], help="of an iteration of 32 images")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "photographs"
        photographs(prefix, PICTURES)
        samples = ImageSamples(prefix, Split(10**6, 1), MODEL, CHANGES)
        for compute_ms in arguments.compute_ms:
            for number in range(ROUNDS):
                expected: list[int] | None = None
                for helpers in (0, *arguments.helpers):
                    found, sums = fed(samples, helpers, compute_ms / 1e3, arguments.iterations)
                    expected = sums if expected is None else expected
                    if sums != expected:
                        raise SystemExit("other pixels with helpers than without")
                    row = {"compute_ms": compute_ms, "helpers": helpers, "round": number, **found}
                    rows.append({**row, "load": os.getloadavg()[0]})
                    print(json.dumps(rows[-1]), flush=True)
    if arguments.results:
        arguments.results.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
