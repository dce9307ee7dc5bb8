"""Text to tokens and index maps, beside megatron-core's own: python -m benchmarks.data [--results FILE]

Needs megatron-core. Its package has no preprocessing program, so that the steps of Megatron-LM's
tools/preprocess_data.py are taken here one after the other in one process: a JSON line is parsed, its text tokenised,
an end added, and the package's own `IndexedDatasetBuilder` is given the document. Both sides have the same tokenizer,
of the `tokenizers` library, learned from the text. The benchmark stops unless files and maps are the same to the last
bit. All times are CPU time, of all processes, so that tokens per CPU second are those of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import Corpus, corpus_of, stdlib_corpus
from data_prep.tokenizers.tokenizer import JsonTokenizer, train_bpe
from megatron_ext.data.index_maps import compute, layout, sample_starts
from megatron_ext.data.indexed_dataset import data_file

ROUNDS = 5
TEXT_MB = 8
VOCAB = 16_000
WORKERS = 2
DOCUMENTS = 1_000_000
TOKENS = 1_000_000_000
SEED = 1234
PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
"""In KiB. The one of getrusage would begin with that of the process that started it."""


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process and of those that `work` starts and ends."""

    def used() -> float:
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    before = used()
    work()
    return used() - before


def medians(contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median CPU seconds of each over rounds in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, work in contenders.items():
            found[name].append(cpu_s(work))
    return {name: statistics.median(times) for name, times in found.items()}


def json_lines(folder: Path, times: int = 1) -> Corpus:
    """The standard library, or its first part, so many times, as JSON lines."""
    path = folder / f"library-{times}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for turn in range(times):
            for source in stdlib_corpus(TEXT_MB).files:
                file.write(json.dumps({"turn": turn, "text": source.read_text(encoding="utf-8")}) + "\n")
    return corpus_of([path])


def megatron(source: Path, tokenizer: JsonTokenizer, prefix: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_str(tokenizer.content)
    encoder.encode_special_tokens = True
    builder = IndexedDatasetBuilder(str(data_file(prefix, ".bin")), dtype=np.uint16)
    with source.open(encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"]
            if not text:
                continue
            ids = [*encoder.encode(text, add_special_tokens=False).ids, tokenizer.end_of_document]
            builder.add_document(torch.IntTensor(ids), [len(ids)])
    builder.finalize(str(data_file(prefix, ".idx")))


def tokens_per_s(folder: Path) -> dict[str, float]:
    """Thousands of tokens for each CPU second."""
    corpus = json_lines(folder)
    texts = (json.loads(line)["text"] for line in corpus.files[0].read_text(encoding="utf-8").splitlines())
    tokenizer = train_bpe(texts, VOCAB)

    def ours(workers: int) -> Callable[[], object]:
        request = Request(corpus=corpus, tokenizer=tokenizer, workers=workers)
        return lambda: prepare(request, folder / f"ours-{workers}")

    times = medians(
        {
            "megatron": lambda: megatron(corpus.files[0], tokenizer, folder / "theirs"),
            "tdpp, 1 worker": ours(1),
            f"tdpp, {WORKERS} workers": ours(WORKERS),
        }
    )
    for suffix in (".bin", ".idx"):
        whole = {data_file(folder / name, suffix).read_bytes() for name in ("theirs", "ours-1", f"ours-{WORKERS}")}
        assert len(whole) == 1, f"the {suffix} files differ"
    tokens = data_file(folder / "theirs", ".bin").stat().st_size // 2
    return {name: round(tokens / seconds / 1000) for name, seconds in times.items()}


def memory_mb(folder: Path) -> dict[str, int]:
    """Largest resident memory of preparing some text, and four times as much."""
    found = {}
    for times in (1, 4):
        source = json_lines(folder, times).files[0]
        arguments = ["prepare", "--source", str(source), "--output", str(source), "--workers", "1"]
        arguments += ["--tokenizer", str(data_file(folder / "ours-1", ".tokenizer.json"))]
        code = f"from launch.commands.data import main; main({arguments})\n{PEAK}"
        done = subprocess.run([sys.executable, "-c", code], check=True, text=True, stdout=subprocess.PIPE)
        found[f"{source.stat().st_size / 1e6:.0f} MB of text"] = int(done.stdout.splitlines()[-1]) // 1024
    return found


def lengths() -> NDArray[np.int32]:
    """Writes `DOCUMENTS` documents with `TOKENS` tokens, spread as those of the web are."""
    drawn = np.random.default_rng(0).lognormal(6.4, 1.0, DOCUMENTS)
    return np.maximum(drawn * (TOKENS / drawn.sum()), 1).astype(np.int32)


def index_maps(sizes: NDArray[np.int32], sequence_length: int, epochs: int) -> dict[str, float]:
    """CPU milliseconds for all three maps, and for where the samples begin alone."""
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index
    from megatron.core.datasets.helpers import build_sample_idx

    tokens = int(sizes.sum(dtype=np.int64))
    samples = (epochs * tokens - 1) // sequence_length
    plan = layout(tokens, samples, sequence_length)
    documents = np.arange(len(sizes), dtype=np.int32)

    def theirs() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        random = np.random.RandomState(SEED)
        order = _build_document_index(documents, plan.epochs, random, plan.separate_last_epoch)
        starts = build_sample_idx(sizes, order, sequence_length, plan.epochs, tokens, True, True)
        return order, starts, _build_shuffle_index(plan.shuffled_together, starts.shape[0] - 1, random)

    def ours() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return compute(sizes, range(len(sizes)), samples, sequence_length, SEED)

    for own, other in zip(ours(), theirs(), strict=True):
        assert own.dtype == other.dtype and np.array_equal(own, other), "the maps differ"
    order = ours()[0]

    def our_starts() -> None:
        found = np.empty((plan.samples + 1, 2), np.int32)
        for first, document, offset in sample_starts(sizes, order, sequence_length):
            found[first : first + len(document), 0] = document
            found[first : first + len(document), 1] = offset

    times = medians(
        {
            "megatron, all maps": theirs,
            "tdpp, all maps": ours,
            "megatron, compiled helper": lambda: build_sample_idx(
                sizes, order, sequence_length, plan.epochs, tokens, True, True
            ),
            "tdpp, sample_idx": our_starts,
        }
    )
    return {name: round(1000 * seconds, 1) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--results", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="megatron")  # of Apex and Transformer Engine, which need a GPU
    begun, load = time.strftime("%Y-%m-%d"), [round(load, 1) for load in os.getloadavg()]
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {"thousand_tokens_per_cpu_s": tokens_per_s(Path(folder))}
        found["peak_mb"] = memory_mb(Path(folder))
    sizes = lengths()
    found["index_maps_cpu_ms"] = {
        f"sequence length {sequence_length}, {epochs} epochs": index_maps(sizes, sequence_length, epochs)
        for sequence_length in (1024, 2048)
        for epochs in (1, 2)
    }
    machine = {
        "date": begun,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "load_average_before": load,
    }
    print(json.dumps(found, indent=1))
    if arguments.results is not None:
        arguments.results.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
