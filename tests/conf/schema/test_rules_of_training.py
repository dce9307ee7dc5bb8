"""Every rule of training and its data is told in one message: the keys, the values, what would hold."""

from __future__ import annotations

import re

import pytest

from conf.compose import compose
from conf.errors import ConfigError

REPLICAS = ["parallel.data=2", "parallel.pipeline=1", "parallel.partition=null", "parallel.global_batch_size=4"]

BROKEN = {
    "a loss scale that nothing needs": (
        ["train.loss_scaler=logmax"],
        "train.loss_scaler=logmax has no effect with train.precision=fp32; use train.precision=fp16, or leave it out",
    ),
    "updates beside the sums where gradients are clipped": (
        [*REPLICAS, "train.overlap_optimizer=true"],
        "train.overlap_optimizer=true cannot be combined with train.clip_grad=1: clipping needs the norm of all "
        "gradients "
        "before any weight is updated; use train.clip_grad=0, or train.overlap_optimizer=auto",
    ),
    "updates beside sums in a pipeline": (
        ["train.overlap_optimizer=true", "train.clip_grad=0"],
        "train.overlap_optimizer=true cannot be combined with parallel.pipeline=2: it works only in data parallel "
        "plans; use",
    ),
    "updates beside sums, or not": (
        ["train.overlap_optimizer=sometimes"],
        "train.overlap_optimizer=sometimes must be true, false or auto",
    ),
    "a goal that nothing looks for": (
        ["train.until=loss<=2"],
        "train.until=loss<=2 needs evaluations; set train.eval_interval, in iterations",
    ),
    "a goal that is none": (
        ["train.eval_interval=5", "train.until=loss"],
        "train.until=loss must be a metric, <= or >=, and a number, such as 'loss<=2.5'",
    ),
    "a metric that the family does not have": (
        ["train.eval_interval=5", "train.until=bleu>=24.61"],
        "train.until=bleu>=24.61: an evaluation with model.family=gpt measures loss and perplexity; use one of these",
    ),
    "a metric of which nobody knows whether more is better": (
        ["train.eval_interval=5", "train.best=mine"],
        "train.best=mine must be one of loss, perplexity, nll, accuracy, top-1, top-5, bleu, or another metric as min:",
    ),
    "nothing is held out": (
        ["train.eval_interval=5", "data.split='1,0,0'"],
        "train.eval_interval=5 evaluates on the valid split, but data.split=1,0,0 gives that split no documents; give "
        "it some",
    ),
    "the best of checkpoints that are not saved": (
        ["train.eval_interval=5", "train.best=loss", "train.checkpoint=false"],
        "train.best=loss needs checkpoints, but train.checkpoint=false saves none; use train.checkpoint=true, or",
    ),
    "a cost without prices": (
        ["train.max_cost=5"],
        "train.max_cost=5 ends a run by the price of its nodes, but cluster.groups.local.price_per_hour is not set",
    ),
    "an evaluation of a rehearsal": (
        ["train.eval_interval=5", "executor.rehearse=virtual"],
        "train.eval_interval=5 is for training, but executor.rehearse=virtual trains nothing; use train.eval_interval=",
    ),
    "momentum of an optimizer without": (
        ["train.momentum=0.8"],
        "train.momentum=0.8 has no effect with train.optimizer=adamw; use train.optimizer=sgd, or leave it out",
    ),
    "Nesterov's momentum without any": (
        ["train.optimizer=sgd", "train.nesterov=true", "train.momentum=0"],
        "train.nesterov=true looks ahead along the momentum, but train.momentum=0; use train.momentum=0.9",
    ),
    "a factor of a policy without steps": (
        ["train.lr_gamma=0.5"],
        "train.lr_gamma=0.5 has no effect with train.lr_policy=cosine; use train.lr_policy=step or exponential",
    ),
    "steps of no length": (
        ["train.lr_policy=step"],
        "train.lr_policy=step multiplies the learning rate by train.lr_gamma=0.1 every train.lr_step_iterations",
    ),
    "Noam with an end": (
        ["train.lr_policy=noam", "train.lr_decay_iterations=40"],
        "train.lr_decay_iterations=40 has no effect with train.lr_policy=noam, which has no end; use",
    ),
    "a policy without an end decays to nothing": (
        ["train.lr_policy=constant", "train.lr_decay_iterations=40"],
        "train.lr_decay_iterations=null, or train.lr_policy=cosine or polynomial or linear",
    ),
    "Noam without a warm-up": (
        ["train.lr_policy=noam", "train.lr_warmup_iterations=0"],
        "train.lr_policy=noam needs a warm-up, but train.lr_warmup_iterations=0; give it",
    ),
    "saving at an interval is saving": (
        ["train.save_interval=5", "train.checkpoint=false"],
        "train.save_interval=5 saves checkpoints, but train.checkpoint=false turns them off; use train.checkpoint=true",
    ),
    "memory of nodes is for runs that lose some": (
        ["train.save_memory=5"],
        "train.save_memory=5 keeps checkpoints in the memory of nodes for a run that continues without a lost one; set "
        "elastic.enabled=true",
    ),
    "memory is for more often than the disk": (
        [
            *(
                "train.save_memory=5",
                "train.save_interval=5",
                "elastic.enabled=true",
                "parallel=single",
                "parallel.data=2",
            ),
            *("cluster.groups.local.count=2", "cluster.groups.local.gpus_per_node=1"),
        ],
        "train.save_memory=5 saves no more often than train.save_interval=5",
    ),
    "memory is by iterations": (
        ["train.save_memory=1epoch"],
        "train.save_memory=1epoch must be a whole number of iterations, or auto, or null",
    ),
    "min_lr is not above lr": (
        ["train.min_lr=0.1"],
        "train.min_lr=0.1 must be between 0 and train.lr=0.003",
    ),
    "lr is a number": (["train.lr=nan"], "train.lr=nan must be a number above 0"),
    "warm-up ends before the iterations": (
        ["train.lr_warmup_iterations=50"],
        "less than train.iterations=50; use train.lr_warmup_iterations=5, or train for longer",
    ),
    "warm-up ends before the decay": (
        ["train.lr_warmup_iterations=5", "train.lr_decay_iterations=5"],
        "train.lr_warmup_iterations=5 must be at least 0 and less than train.lr_decay_iterations=5",
    ),
    "a beta is below 1": (["train.adam_beta2=1"], "train.adam_beta2=1.0 must be at least 0 and less than 1"),
    "clipping is not negative": (["train.clip_grad=-1"], "train.clip_grad=-1.0 must be a number, at least 0"),
    "a split is three weights": (["data.split='9,1'"], "data.split='9,1' must be three weights"),
    "a split trains on something": (["data.split='0,1,1'"], "data.split='0,1,1' must be three weights"),
    "corpora have a weight": (["data.weight=-1"], "data.weight=-1.0 must be a number above 0"),
    "other corpora too": (["data.blend=[{prefix:b,weight:0}]"], "data.blend[0].weight=0.0 must be a number above 0"),
    "a corpus is blended once": (
        ["data.prefix=a", "data.blend=[{prefix:b},{prefix:a}]"],
        "data.blend[1].prefix=a is already in the blend",
    ),
    "a corpus is blended once, however its path is written": (
        ["data.prefix=a/b", "data.blend=[{prefix:./a//c/../b}]"],
        "data.blend[0].prefix=./a//c/../b is already in the blend",
    ),
    "every corpus has a place": (["data.blend=[{weight:2}]"], "data.blend[0].prefix is not set"),
    "a missing value is named": (["data.prefix=???"], "data.prefix is not set: give data.prefix=…"),
}


@pytest.mark.parametrize(("overrides", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_names_keys_values_and_what_would_hold(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(overrides)
