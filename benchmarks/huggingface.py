"""An iteration of a Llama through transformers' layers, beside one through tdpp's own, on a CPU.

    python -m benchmarks.huggingface [--rounds N]

Both have the same sizes and pass the same micro-batches in one process, as a rank of the engine does: weights and
gradients in flat memory, forward pass, loss and backward pass of each, then AdamW. They take turns, so that what else
the machine does meets both, and CPU seconds are counted. Prints one JSON object: the medians, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.optimizer.optimizer import Optimizer
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage
from megatron_ext.timeline.recorder import Recorder

LAYERS, HIDDEN, HEADS, GROUPS, INNER, VOCAB = 4, 256, 4, 2, 704, 2048
SIZE, COUNT = 2, 2
"""Samples of a micro-batch, and micro-batches of an iteration."""
CONFIG = {
    **{"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS},
    **{"num_key_value_heads": GROUPS, "intermediate_size": INNER, "vocab_size": VOCAB},
    **{"tie_word_embeddings": False, "max_position_embeddings": 4096},
}
SHAPE = (
    *("model.normalization=RMSNorm", "model.norm_epsilon=1e-6", "model.position_embedding_type=rope"),
    *("model.swiglu=true", "model.add_bias_linear=false", "model.untie_embeddings_and_output_weights=true"),
    *(f"model.layers={LAYERS}", f"model.hidden={HIDDEN}", f"model.heads={HEADS}", f"model.ffn_hidden={INNER}"),
    *(f"model.num_query_groups={GROUPS}", f"model.vocab_size={VOCAB}"),
)


class Contender:
    """The whole model of a plan on this process."""

    def __init__(self, plan: Plan) -> None:
        self._task = task_of(plan)
        self._stage = Stage(self._task, cut_between(self._task, [self._task.blocks])[0], TensorGroup())
        self._stage.initialise(1)
        cpu = torch.device("cpu")
        flat = FlatWeights(self._stage.parameters_by_name(), torch.float32, cpu)
        self._stage.place(cpu, torch.float32)
        self._stage.defer_weight_grads(WeightGradients(flat.add, flat.add_rows), self._stage.shared, flat.adds)
        self._optimizer = Optimizer(flat, plan.train)
        self.parameters = sum(one.numel() for _, one in self._stage.parameters_by_name())

    def seconds(self, tokens: torch.Tensor) -> float:
        """CPU seconds of an iteration over tokens [micro-batches, size, sequence + 1]."""
        began = time.process_time()
        for batch in tokens:
            micro = self._task.micro({"tokens": batch, "number": torch.arange(len(batch))})
            self._stage.begin(0)
            left = self._stage({name: micro.inputs[name] for name in self._stage.inputs})
            loss = self._task.loss(left, micro, TensorGroup()) / len(tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(Recorder(None))
        return time.process_time() - began


def measured(rounds: int, length: int) -> dict[str, object]:
    """Medians over so many rounds of sequences of this length, after one that is not counted."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(CONFIG))
        batch = (f"parallel.micro_batch_size={SIZE}", f"parallel.global_batch_size={SIZE * COUNT}")
        words = ("parallel=single", f"model.sequence_length={length}", "parallel.partition=null", *batch)
        contenders = {
            "tdpp": Contender(make_plan(compose([*words, *SHAPE]), "benchmark/own")),
            "transformers": Contender(
                make_plan(compose(["model=huggingface", f"model.config={file}", *words]), "benchmark/theirs")
            ),
        }
    sizes = {one.parameters for one in contenders.values()}
    assert len(sizes) == 1, sizes
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    source = torch.Generator().manual_seed(0)
    for _ in range(rounds + 1):
        tokens = torch.randint(VOCAB, (COUNT, SIZE, length + 1), generator=source)
        for name, one in contenders.items():
            taken[name].append(one.seconds(tokens))
    medians = {name: median(of[1:]) for name, of in taken.items()}
    ratio = median(theirs / own for own, theirs in zip(taken["tdpp"][1:], taken["transformers"][1:], strict=True))
    return {"cpu_seconds": medians, "ratio": round(ratio, 4), "tokens": length, "parameters": sizes.pop()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(arguments.rounds, arguments.tokens)
    print(json.dumps({**found, "rounds": arguments.rounds, "load": os.getloadavg()[0]}, indent=2))


if __name__ == "__main__":
    main()
