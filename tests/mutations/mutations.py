"""Mistakes that somebody could make in the engine, the search and the judge, and the tests that catch them."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A change of one place in a file that makes it wrong."""

    file: str
    old: str
    """Occurs once in the file."""
    new: str
    test: str
    """What fails then: a test, or a file of tests."""


_RULES, _CAUSES = "launch/judge/rules.py", "launch/judge/causes.py"
_PROGRESS, _GPUS = "launch/judge/progress.py", "launch/judge/gpu_health.py"
_ORDERS, _PARETO, _EXACT = "fasop/search/space/node_orders.py", "fasop/search/front.py", "fasop/partition/exact.py"
_ITERATION, _VECTORISED = "fasop/simulation/iteration.py", "fasop/simulation/vectorised.py"
_SCALE, _SHARE = "megatron_ext/engine/optimizer/precision.py", "megatron_ext/engine/gradients/share.py"
_UPDATE, _RATE = "megatron_ext/engine/optimizer/update_rules.py", "megatron_ext/engine/optimizer/learning_rate.py"
_EXECUTOR, _LOSS = "megatron_ext/engine/executor/executor.py", "megatron_ext/parallel/cross_entropy.py"
_DEAL, _REPLAY = "megatron_ext/contract/schedule/iteration.py", "megatron_ext/contract/schedule/replay.py"

_JUDGED = "tests/launch/judge/"
_SEARCHED = "tests/fasop/search/"
_RUN = "tests/megatron_ext/engine/"
_PROVED = "tests/fasop/partition/test_partition.py::test_the_best_partition_is_found_and_proved"
_PREDICTED = "tests/fasop/simulation/test_predict.py::test_one_plan_takes_what_the_search_says"
_REPLAYED = "tests/fasop/simulation/test_fast.py::test_every_stage_ends_when_the_replay_says"
_LINKED = (
    "tests/fasop/simulation/test_fast.py"
    "::test_links_that_are_occupied_for_a_part_of_a_message_are_free_when_the_replay_says"
)
_PARTS = _RUN + "test_parts.py"
_ALONE = _RUN + "optimizer/test_optimizers_agree.py::test_alone_it_equals_the_textbook"

JUDGE = (
    Mutation(
        _RULES,
        "return State.lost if first.rule in LOST else State.failed, first.rule",
        "return State.failed, first.rule",
        _JUDGED + "test_verdict.py",
    ),
    Mutation(_RULES, "node.exit_code not in (0, SAVED)]", "node.exit_code != 0]", _JUDGED + "test_verdict.py"),
    Mutation(
        _RULES,
        "return well and bool(seen.log) and seen.log[-1].iteration == seen.iterations",
        "return well and bool(seen.log)",
        _JUDGED + "test_verdict.py",
    ),
    Mutation(_RULES, "    _failure,\n    _stop,\n", "    _stop,\n    _failure,\n", _JUDGED + "test_verdict.py"),
    Mutation(_RULES, "math.isfinite(last.loss)", "not math.isnan(last.loss)", _JUDGED + "test_verdict.py"),
    Mutation(
        _RULES,
        "first = min(reasons, key=lambda node: node.seen_unix)",
        "first = max(reasons, key=lambda node: node.seen_unix)",
        _JUDGED + "test_verdict.py",
    ),
    Mutation(
        _RULES,
        "not node.ended and silent_s > SILENCE_S",
        "not node.ended and silent_s > 100 * SILENCE_S",
        _JUDGED + "test_slurm_silent.py",
    ),
    Mutation(
        _RULES,
        "if (seen.log and not is_late(seen)) or len(seen.gpus)",
        "if len(seen.gpus)",
        _JUDGED + "test_verdict_gpus.py",
    ),
    Mutation(_RULES, "if seen.over or not held or not held[0].stopped:", "if True:", _JUDGED + "test_stalled_ranks.py"),
    Mutation(
        _RULES,
        'node.state == "running" for node in seen.nodes):\n        silences',
        "True for node in seen.nodes):\n        silences",
        _JUDGED + "test_verdict.py",
    ),
    Mutation(_CAUSES, "_SPREAD_S = 2.0", "_SPREAD_S = -2.0", _JUDGED + "test_verdict.py"),
    Mutation(
        _CAUSES,
        "if len(others) > 1 and len(others) == of - 1:",
        "if len(others) > 1 and len(others) == of:",
        _JUDGED + "test_status_text.py",
    ),
    Mutation(_CAUSES, '"TIMEOUT": "time-limit"', '"TIMEOUT": "preempted"', _JUDGED + "test_slurm_verdict.py"),
    Mutation(_CAUSES, "return None if node.alive else True", "return True", _JUDGED + "test_verdict.py"),
    Mutation(_CAUSES, "if node.exit_code < 0:", "if node.exit_code < -100:", _JUDGED + "test_verdict.py"),
    Mutation(_CAUSES, "key=lambda cause: cause.unix)", "key=lambda cause: -cause.unix)", _JUDGED + "test_verdict.py"),
    Mutation(_CAUSES, "if ranks_told:", "if not ranks_told:", _JUDGED + "test_verdict.py"),
    Mutation(_PROGRESS, "STALL_LINES = 5", "STALL_LINES = 50", _JUDGED + "test_verdict.py"),
    Mutation(
        _PROGRESS,
        "seen.now_unix - max(last, began) >= patience",
        "seen.now_unix - last >= patience",
        _JUDGED + "test_verdict.py",
    ),
    Mutation(
        _PROGRESS,
        "(end // interval - last // interval + (end % interval > 0))",
        "(end // interval - last // interval)",
        _JUDGED + "test_status_text.py",
    ),
    Mutation(_PROGRESS, "return samples / rate +", "return samples * rate +", _JUDGED + "test_pace.py"),
    Mutation(_GPUS, "return sampled_s > GRACE_S or", "return sampled_s > 0 or", _JUDGED + "test_gpu_health.py"),
    Mutation(_GPUS, "gpu.utilisation >= FULL", "gpu.utilisation >= EMPTY", _JUDGED + "test_gpu_health.py"),
    Mutation(
        _GPUS,
        "gpu.power_w <= LITTLE_POWER * gpu.power_limit_w",
        "gpu.power_w <= gpu.power_limit_w",
        _JUDGED + "test_gpu_health.py",
    ),
    Mutation(
        _GPUS,
        "if not waiting or len(waiting) + len(resting) < count:",
        "if not waiting:",
        _JUDGED + "test_gpu_health.py",
    ),
    Mutation(_GPUS, "all(process.ours is False for", "any(process.ours is False for", _JUDGED + "test_gpu_health.py"),
)

SEARCH = (
    Mutation(
        _ORDERS,
        "math.log10(orders + 0.5)",
        "math.log10(2 * orders)",
        _SEARCHED + "test_orders.py::test_every_order_comes_once",
    ),
    Mutation(
        _ORDERS,
        "[(kind, first), *runs, (kind, nodes[kind] - first)]",
        "[(kind, nodes[kind]), *runs]",
        _SEARCHED + "test_orders.py::test_the_first_orders_keep_kinds_together_or_have_one_at_both_ends",
    ),
    Mutation(
        _ORDERS,
        "every[(every != order).any(axis=1)][:NEAR]",
        "every[:NEAR]",
        _SEARCHED + "test_orders.py::test_neighbours_are_orders_of_the_same_nodes",
    ),
    Mutation(
        _PARETO,
        "one[1] < kept[-1][1]",
        "one[1] > kept[-1][1]",
        _SEARCHED + "test_pareto.py::test_a_front_is_what_looking_at_every_plan_finds",
    ),
    Mutation(_EXACT, "(column)) < self.seconds:", "(column)) > self.seconds:", _PROVED),
    Mutation(_EXACT, "bound = min(bound, search.seconds, enough)", "bound *= 1.02", _PROVED),
    Mutation(_ITERATION, "known = max(shared)\n    events = []", "known = min(shared)\n    events = []", _PREDICTED),
    Mutation(_ITERATION, "return known + first, events, slowest", "return known, events, slowest", _PREDICTED),
    Mutation(
        _ITERATION,
        'spent["messages"] += took - waited',
        'spent["messages"] += took',
        "tests/fasop/simulation/test_predict.py::test_the_terms_of_a_stage_are_all_of_the_iteration",
    ),
    Mutation(
        _VECTORISED, "np.maximum(done, messages[reads], out=done)", "np.add(done, messages[reads], out=done)", _REPLAYED
    ),
    Mutation(
        _VECTORISED,
        "begin = done if links is None else links.begin(kind, stages, parts, done, begins[stages])",
        "begin = done",
        _LINKED,
    ),
    Mutation(
        _VECTORISED,
        "*(SHARES[kind] * times.backward for",
        "*(1.2 * SHARES[kind] * times.backward for",
        _REPLAYED,
    ),
    Mutation(_VECTORISED, "np.maximum(made, free, out=out)", "np.copyto(out, made)", _LINKED),
    Mutation(_VECTORISED, "here[stages] = np.where(waited[step], 0, on_path)", "here[stages] = on_path", _PROVED),
)

ENGINE = (
    Mutation(_SCALE, "self.scale *= 2.0", "self.scale *= 4.0", _PARTS),
    Mutation(_SCALE, "if self.patience <= 0:", "if self.patience < 0:", _PARTS),
    Mutation(_SCALE, "self.good, self.patience = 0, self.hysteresis", "self.good = 0", _PARTS),
    Mutation(_SCALE, "known = 1.0 - SLOW**self.seen", "known = 1.0", _RUN + "optimizer/test_precision.py"),
    Mutation(
        _SHARE,
        "here.start // unit * own",
        "here.start // unit",
        _RUN + "test_share.py",
    ),
    Mutation(_SHARE, "flat[here].copy_(kept[own])", "flat[own].copy_(kept[own])", _RUN + "test_share.py"),
    Mutation(_UPDATE, "train.adam_beta2 ** (updates + 1)", "train.adam_beta2 ** (updates + 2)", _ALONE),
    Mutation(_UPDATE, "weights / updates, torch", "updates / weights, torch", _ALONE),
    Mutation(
        _UPDATE,
        "1.0 - lr * decay)",
        "1.0 - decay)",
        _RUN + "test_layouts_agree.py::test_a_loss_of_many_logits_taken_some_at_a_time_is_the_same",
    ),
    Mutation(
        _RATE,
        "0.5 * (math.cos(math.pi * done) + 1.0)",
        "math.cos(0.5 * math.pi * done)",
        _RUN + "optimizer/test_learning_rate.py",
    ),
    Mutation(
        _RATE, "(1.0 - done) ** train.lr_power", "1.0 - done**train.lr_power", _RUN + "optimizer/test_learning_rate.py"
    ),
    Mutation(
        _RATE,
        "return train.lr * updates / train.lr_warmup_iterations",
        "return train.lr * (updates + 1) / train.lr_warmup_iterations",
        _RUN + "optimizer/test_learning_rate.py",
    ),
    Mutation(
        _RATE,
        "math.sqrt(train.lr_warmup_iterations / updates)",
        "train.lr_warmup_iterations / updates",
        _RUN + "optimizer/test_learning_rate.py",
    ),
    Mutation(
        _RATE,
        "(updates - train.lr_warmup_iterations) // _step_length(train)",
        "updates // _step_length(train)",
        _RUN + "optimizer/test_learning_rate.py",
    ),
    Mutation(
        _RATE, "max(train.min_lr, train.lr * math.pow", "(train.lr * math.pow", _RUN + "optimizer/test_learning_rate.py"
    ),
    Mutation(
        _EXECUTOR,
        "loss = self._loss(left, micro) * loss_factor",
        "loss = self._loss(left, micro)",
        _RUN + "test_layouts_agree.py::test_a_loss_of_many_logits_taken_some_at_a_time_is_the_same",
    ),
    Mutation(
        _EXECUTOR,
        "if tensor.requires_grad\n            }",
        "if False\n            }",
        _RUN + "test_layouts_agree.py::test_a_loss_of_many_logits_taken_some_at_a_time_is_the_same",
    ),
    Mutation(
        _EXECUTOR,
        "with self._later.defer(key):\n                    self._backward(kind, key)",
        "self._backward(kind, key)",
        _RUN + "test_layouts_agree.py::test_gradients_of_large_weights_that_a_cpu_adds_in_place_are_the_same",
    ),
    Mutation(
        _LOSS,
        "(own_log_sum - largest).exp()",
        "own_log_sum.exp()",
        _RUN + "test_layouts_agree.py::test_a_loss_of_many_logits_taken_some_at_a_time_is_the_same",
    ),
    Mutation(
        _LOSS,
        "classes = max(0, min(share, vocab_size - first))\n    if tensor.size",
        "classes = share\n    if tensor.size",
        "tests/megatron_ext/parallel/test_cross_entropy.py",
    ),
    Mutation(
        _DEAL,
        "((2 * k + 1) / (2 * count), replica)",
        "((k + 1) / count, replica)",
        "tests/megatron_ext/contract/schedule/test_deal.py",
    ),
    Mutation(
        _REPLAY, "if message[:3] != wanted:", "if False:", "tests/megatron_ext/contract/schedule/test_schedule.py"
    ),
)

MUTATIONS = (*JUDGE, *SEARCH, *ENGINE)
