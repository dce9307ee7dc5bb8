"""Course, times and memory in a log of Megatron-LM."""

from __future__ import annotations

from reports.readers.upstream_log import Memory, parse

SET_UP = """\
> setting tensorboard ...
(min, max) time across ranks (ms):
    model-and-optimizer-setup ......................: (812.55, 820.01)
    train/valid/test-data-iterators-setup ..........: (101.11, 150.32)
training ...
"""


def block(iteration: int, loss: float | None, elapsed: float) -> str:
    said = "" if loss is None else f"lm loss: {loss:.6E} | "
    return f"""\
 [2026-11-21 08:10:{iteration:02d}.123456] iteration {iteration:8d}/      30 | consumed samples: {iteration * 4:12d} | \
elapsed time per iteration (ms): {elapsed:.1f} | throughput per GPU (TFLOP/s/GPU): 31.4 | learning rate: 1.5E-04 | \
global batch size:     4 | {said}loss scale: 1.0 | grad norm: 2.125 | number of skipped iterations:   0 | \
number of nan iterations:   0 |
Number of parameters in billions:  1.56
(min, max) time across ranks (ms):
    forward-backward ...............................: ({elapsed - 40:.2f}, {elapsed - 30:.2f})
    optimizer-copy-to-main-grad ....................: (0.12, {elapsed / 100:.2f})
"""


MEMORY = """\
[Rank 2] (after 1 iterations) memory (MB) | allocated: 5000.25 | max allocated: 6000.50 | reserved: 7000.00 | max reserved: 7000.00
[Rank 2] (after 2 iterations) memory (MB) | allocated: 5200.25 | max allocated: 6300.50 | reserved: 7100.00 | max reserved: 7100.00
[Rank 0] (after 2 iterations) memory (MB) | allocated: 5100.25 | max allocated: 8150.75 | reserved: 9000.00 | max reserved: 9100.00
"""  # noqa: E501
LOG = SET_UP + block(1, 10.9, 4000) + MEMORY + block(10, 9.5, 500) + block(20, 8.25, 400) + block(30, None, 440)


def test_every_logged_iteration_is_there_as_in_metrics_jsonl() -> None:
    metrics = parse(LOG.splitlines()).with_tokens(1024, 4).metrics
    assert [line["iteration"] for line in metrics] == [1, 10, 20, 30]
    assert {key: metrics[2][key] for key in ("loss", "elapsed_ms", "grad_norm", "tflops_per_rank", "tokens_per_s")} == {
        "loss": 8.25,
        "elapsed_ms": 400.0,
        "grad_norm": 2.125,
        "tflops_per_rank": 31.4,
        "tokens_per_s": 10240.0,
    }


def test_tokens_a_second_are_those_of_the_batch_that_a_line_had_while_it_grew() -> None:
    """`--rampup-batch-size 4 8 …`; the run went on from a checkpoint, so that its first line tells of no batch."""
    steps = ((10, 100, 100.0), (20, 140, 200.0), (30, 260, 600.0))
    lines = [
        block(iteration, 9.5, elapsed).replace(f"samples: {iteration * 4:12d}", f"samples: {samples:12d}")
        for iteration, samples, elapsed in steps
    ]
    rates = [line["tokens_per_s"] for line in parse("".join(lines).splitlines()).with_tokens(1024, 12).metrics]
    assert rates == [40960.0, 20480.0, 20480.0]
    uncounted = [line.replace("consumed samples", "shown samples") for line in lines]
    assert parse(uncounted[0].splitlines()).with_tokens(1024, 12).metrics[0]["tokens_per_s"] == 122880.0


def test_timers_are_medians_after_the_first_block_and_without_the_set_up() -> None:
    assert parse(LOG.splitlines()).timers == {
        "forward-backward": (400.0, 410.0),
        "optimizer-copy-to-main-grad": (0.12, 4.4),
    }


def test_a_single_block_of_timers_stands_for_itself() -> None:
    assert parse(block(1, 10.9, 4000).splitlines()).timers["forward-backward"] == (3960.0, 3970.0)


def test_memory_is_what_a_rank_told_last() -> None:
    assert parse(LOG.splitlines()).memory == {
        0: Memory(5100.25, 8150.75, 9000.0, 9100.0),
        2: Memory(5200.25, 6300.5, 7100.0, 7100.0),
    }
