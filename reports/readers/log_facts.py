"""What a log says about its own job: sizes, batches, model.

Three printers are known: the job scripts of the FASOP authors (`DP_SIZE: 4`), Megatron-LM's list of its arguments
(`  pipeline_model_parallel_size .............. 8`) and the line that it begins with (`using world size: 32, …`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from conf.run_folder.log_lines import progress

_ECHO = re.compile(r"([A-Z][A-Z_]*) ?: ([\w.-]{1,200})")
_ARGUMENT = re.compile(r"  (\w+) \.{3,} (.{1,500}?)\s*")
_WORLD = re.compile(r"using (world size: .+?)\s*")
_SIZE = re.compile(
    r"(?<!encoder-)(world size|(?:data|context|tensor-model|pipeline-model)-parallel[- ]size): (\d{1,9})"
)
"""Some versions have no comma before one of them: `sizes: Nonetensor-model-parallel size: 2`."""
_ITERATION_BATCH = re.compile(r"\| global batch size: +(\d{1,9}) \|")

KEYS = {
    "tensor": ("tensor_mp_size", "tensor_model_parallel_size"),
    "data": ("dp_size", "data_parallel_size"),
    "pipeline": ("pipeline_mp_size", "pipeline_model_parallel_size"),
    "context": ("context_parallel_size",),
    "world": ("world_size",),
    "nodes": ("nnodes",),
    "node_rank": ("node_rank",),
    "global_batch_size": ("global_batch_size",),
    "micro_batch_size": ("micro_batch_size",),
    "chunks": ("virtual_pipeline_model_parallel_size",),
    "layers": ("num_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "first_layers": ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
    "last_layers": ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
    "sequence_length": ("seq_length",),
    "padded_vocab_size": ("padded_vocab_size",),
}
"""Numbers by our name: how they are called, in lower case and with underscores."""
_NAMES = {name: ours for ours, names in KEYS.items() for name in names}
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "standalone_embedding_stage",
    "hybrid_layer_pattern",
)
"""Arguments of Megatron-LM that, where they are given, lay out the layers in another way than evenly."""
_PARTITION = re.compile(r"\d{1,4}(?:-\d{1,4})*")


MANY = -1
"""The node rank of a file with the output of several nodes."""


@dataclass(kw_only=True)
class Facts:
    """What one file says. `watch` fills it."""

    numbers: dict[str, int] = field(default_factory=dict)
    """What was said last, by a name of KEYS."""
    partition: tuple[int, ...] = ()
    listed: bool = False
    """Whether Megatron-LM lists its arguments."""
    uneven: bool = False
    """Whether one of them lays out the layers in a way that is not known here."""
    iterations: int = 0
    """That of the training's end."""
    notes: list[str] = field(default_factory=list)
    known: bool = False
    """Whether there was any line that it knows."""
    strange: tuple[int, str] | None = None
    """The first line after all that it knows, by number, and how it begins."""

    def watch(self, lines: Iterable[str]) -> Iterator[str]:
        """Passes the lines on and takes from them what it knows."""
        for number, line in enumerate(lines, 1):
            known = True
            if (reached := progress(line)) is not None:
                self.iterations = reached[1]
                if (batch := _ITERATION_BATCH.search(line)) is not None:
                    self._note("global_batch_size", batch[1])
            elif (match := _ECHO.fullmatch(line)) is not None:
                self._note(match[1], match[2])
            elif (match := _ARGUMENT.fullmatch(line)) is not None:
                self.listed = True
                self.uneven = self.uneven or (match[1] in _UNEVEN and match[2] not in ("None", "False"))
                self._note(match[1], match[2])
            elif (world := _WORLD.fullmatch(line)) is not None:
                for name, size in _SIZE.findall(world[1]):
                    self._note(name, size)
            else:
                known = False
            if known:
                self.known, self.strange = True, None
            elif self.strange is None and line.strip():
                self.strange = (number, line[:60])
            yield line

    def _note(self, name: str, value: str) -> None:
        name = name.lower().replace("-", "_").replace(" ", "_")
        if name == "partition" and _PARTITION.fullmatch(value):
            self.partition = tuple(map(int, value.split("-")))
        key = _NAMES.get(name)
        if key is None or not value.isdecimal() or len(value) > 9 or (int(value) == 0 and key != "node_rank"):
            return
        before = self.numbers.setdefault(key, int(value))
        if key == "node_rank" and before != int(value):  # the output of several nodes: it is not a single one's
            self.numbers[key] = MANY
            return
        if before != int(value) and key != "global_batch_size":  # that may grow while it trains
            self.notes.append(f"the log says {name} {before} and later {value}; the later value counts")
        self.numbers[key] = int(value)
