"""In place of Megatron-LM's script: takes its options and no others, and trains a GPT by megatron.core on drawn tokens.

With FAIL_RANK=<rank> in the environment, that rank raises an error in iteration 2; PACE_S=<seconds> is how much longer
each forward pass takes.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

OPTIONS = Path(__file__).parents[3] / "launch" / "golden" / "megatron_lm_options.txt"


def parser() -> argparse.ArgumentParser:
    """Knows every option of Megatron-LM by its name and number of values."""
    known = argparse.ArgumentParser(allow_abbrev=False)
    for line in OPTIONS.read_text().splitlines():
        if line.startswith("--"):
            name, values = line.split()
            if values == "0":
                known.add_argument(name, action="store_true")
            elif values == "1":
                known.add_argument(name)
            else:
                known.add_argument(name, nargs=int(values) if values.isdigit() else values)
    return known


def _arguments() -> Any:
    args = parser().parse_args()
    for name, value in vars(args).items():
        if isinstance(value, str) and value.isdigit():
            setattr(args, name, int(value))
    args.lr, args.clip_grad = float(args.lr), float(args.clip_grad)
    args.timing_log_level, args.timing_log_option = args.timing_log_level or 0, args.timing_log_option or "minmax"
    args.exit_signal = signal.SIGTERM
    return args


def _config(args: Any) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    stages = args.pipeline_model_parallel_layout.count("|") + 1 if args.pipeline_model_parallel_layout else 1
    chunks = stages // args.pipeline_model_parallel_size
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )


def model_provider(args: Any, config: Any, chunk: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        args.vocab_size,
        args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=True,
        vp_stage=chunk,
    )


def forward_step(args: Any, numbers: Any, model: Any) -> Any:
    import torch
    from megatron.core import parallel_state

    if args.curr_iteration == 1 and os.environ.get("FAIL_RANK") == str(args.rank):
        raise RuntimeError("out of luck")
    time.sleep(float(os.environ.get("PACE_S", "0")))
    which = (args.curr_iteration, parallel_state.get_data_parallel_rank(), next(numbers))
    drawn = torch.Generator().manual_seed(which[0] * 10_000 + which[1] * 100 + which[2])
    size = (args.micro_batch_size, args.seq_length + 1)
    tokens = torch.randint(args.vocab_size // 4, size, generator=drawn)  # so that there is something to learn
    places = torch.arange(args.seq_length).expand(args.micro_batch_size, -1)
    mask = torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool).triu(1)
    left = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])

    def loss(left: Any) -> tuple[Any, dict[str, Any]]:
        mean = left.float().mean()
        return mean, {"lm loss": mean.detach().clone()}

    return left, loss


def main() -> None:
    from megatron.training.training import pretrain

    args = _arguments()
    pretrain(args, _config(args), partial(model_provider, args), partial(forward_step, args))


if __name__ == "__main__":
    main()
