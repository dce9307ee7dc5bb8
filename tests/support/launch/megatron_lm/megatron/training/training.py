"""In place of Megatron-LM's: groups, model, optimizer and loop, by megatron.core and in the order of its calls."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training.global_vars import get_args, get_signal_handler, get_timers, set_global_variables


def pretrain(args: Any, config: Any, model_provider: Any, forward_step: Any) -> None:
    """Trains until the last iteration, or until the signal comes."""
    assert torch.cuda.is_available(), "Megatron requires CUDA."
    set_global_variables(args)
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if dist.is_initialized():
        assert (args.rank, args.world_size) == (dist.get_rank(), dist.get_world_size())
    else:
        dist.init_process_group(args.distributed_backend)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    torch.manual_seed(args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    data = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(args.rank, None, args.global_batch_size, args.micro_batch_size, data)
    chunks = config.virtual_pipeline_model_parallel_size or 1
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = [
        DistributedDataParallel(config, ddp, model_provider(config, chunk if chunks > 1 else None))
        for chunk in range(chunks)
    ]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=args.clip_grad), model)
    train(forward_step, model, optimizer, config, _load(args, model, optimizer))


def train(forward_step: Any, model: Any, optimizer: Any, config: Any, iteration: int) -> None:
    args, timers = get_args(), get_timers()
    config.timers = timers
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    args.consumed_train_samples = iteration * args.global_batch_size
    timers("interval-time", log_level=0).start(barrier=True)
    while iteration < args.train_iters:
        args.curr_iteration = iteration
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        iterators = [iter(range(get_num_microbatches())) for _ in model]
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        timers("optimizer", log_level=1).start(barrier=False)
        successful, grad_norm, _ = optimizer.step()
        timers("optimizer").stop()
        iteration += 1
        args.consumed_train_samples += args.global_batch_size
        mean = {"lm loss": torch.stack([one["lm loss"] for one in losses]).mean()} if losses else {}
        if mean:
            dist.all_reduce(mean["lm loss"], group=parallel_state.get_data_parallel_group())
            mean["lm loss"] /= parallel_state.get_data_parallel_world_size()
        training_log(mean, {}, args.lr, iteration, 1.0, False, int(not successful), grad_norm)
        asked = get_signal_handler() is not None and any(get_signal_handler().signals_received())
        if args.save and (asked or iteration % args.save_interval == 0 or iteration == args.train_iters):
            _save(args, model, optimizer, iteration)
        if asked:
            print("exiting program after receiving a signal", flush=True)
            sys.exit(0)


def training_log(
    loss_dict: Any,
    total_loss_dict: Any,
    learning_rate: Any,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float,
) -> bool:
    args, timers = get_args(), get_timers()
    if iteration % args.log_interval == 0:
        each = timers("interval-time").elapsed(barrier=True) / args.log_interval * 1e3
        if args.rank == args.world_size - 1:
            print(
                f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{args.train_iters:8d} | consumed "
                f"samples: {args.consumed_train_samples:12d} | elapsed time per iteration (ms): {each:.1f} | learning "
                f"rate: {learning_rate:.6E} | global batch size: {args.global_batch_size:5d} | lm loss: "
                f"{float(loss_dict['lm loss']):.6E} | loss scale: {loss_scale:.1f} | grad norm: {grad_norm:.3f} | "
                f"number of skipped iterations: {skipped_iter:3d} | number of nan iterations:   0 |",
                flush=True,
            )
    return report_memory_flag


def _file(args: Any, iteration: int) -> Path:
    return Path(args.save, f"iter_{iteration:07d}", f"rank-{args.rank}.pt")


def _save(args: Any, model: Any, optimizer: Any, iteration: int) -> None:
    timers = get_timers()
    timers("save-checkpoint", log_level=0).start(barrier=True)
    file = _file(args, iteration)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save([[chunk.state_dict() for chunk in model], optimizer.state_dict()], file)
    dist.barrier()
    if args.rank == 0:
        Path(args.save, "latest_checkpointed_iteration.txt").write_text(str(iteration))
    timers("save-checkpoint").stop(barrier=True)


def _load(args: Any, model: Any, optimizer: Any) -> int:
    tracker = Path(args.load or "", "latest_checkpointed_iteration.txt")
    if not args.load or not tracker.is_file():
        return 0
    iteration = int(tracker.read_text())
    of_model, of_optimizer = torch.load(_file(args, iteration), weights_only=False)
    for chunk, state in zip(model, of_model, strict=True):
        chunk.load_state_dict(state)
    optimizer.load_state_dict(of_optimizer)
    optimizer.reload_model_params()
    return iteration
