"""Every rule of a configuration is told in one message: the keys, the values, what would hold."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.experiment import Cluster, Experiment, Gpu, NodeGroup, Parallel

SEED = "experiment=seed_a10x8"
HET = "experiment=seed_a100x1_a10x7"
REPLICAS = ["parallel.data=2", "parallel.pipeline=1", "parallel.partition=null", "parallel.global_batch_size=4"]

BROKEN = {
    "a loss scale that nothing needs": (
        ["train.loss_scaler=logmax"],
        "train.loss_scaler=logmax does nothing with train.precision=fp32; use train.precision=fp16, or leave it out",
    ),
    "updates beside the sums where gradients are clipped": (
        [*REPLICAS, "train.overlap_optimizer=true"],
        "train.overlap_optimizer=true does not go with train.clip_grad=1: clipping needs the norm of all gradients "
        "before any weight is updated; use train.clip_grad=0, or train.overlap_optimizer=auto",
    ),
    "updates beside sums in a pipeline": (
        ["train.overlap_optimizer=true", "train.clip_grad=0"],
        "train.overlap_optimizer=true does not go with parallel.pipeline=2: it is for data parallel plans; use",
    ),
    "updates beside sums, or not": (
        ["train.overlap_optimizer=sometimes"],
        "train.overlap_optimizer=sometimes must be true, false or auto",
    ),
    "streams in a pipeline": (
        ["parallel.streams=2"],
        "parallel.streams=2 does not go with parallel.pipeline=2: it is for data parallel plans; use",
    ),
    "streams of other replicas": (
        [*REPLICAS, "parallel.streams=2-1-1"],
        "parallel.streams=2-1-1 is for 3 replicas, but parallel.data=2; give one number, or as many as replicas",
    ),
    "micro-batches that streams cannot share": (
        [*REPLICAS, "parallel.streams=3-1"],
        "parallel.streams=3-1: a replica takes 1 micro-batch, which its 3 streams cannot share evenly; use",
    ),
    "streams of compiled layers": (
        [*REPLICAS, "parallel.micro_batch_size=1", "parallel.streams=2", "train.compile=true"],
        "parallel.streams=2 does not go with train.compile=true; use train.compile=false, or parallel.streams=null",
    ),
    "no streams": ([*REPLICAS, "parallel.streams=0"], "parallel.streams=0 must be a number from 1 to 64, or one for"),
    "a goal that nothing looks for": (
        ["train.until=loss<=2"],
        "train.until=loss<=2 is of evaluations, and there are none without train.eval_interval; give it a number",
    ),
    "a goal that is none": (
        ["train.eval_interval=5", "train.until=loss"],
        "train.until=loss must be a metric, <= or >=, and a number, such as 'loss<=2.5'",
    ),
    "a metric that the family does not have": (
        ["train.eval_interval=5", "train.until=bleu>=24.61"],
        "train.until=bleu>=24.61: an evaluation with model.family=gpt gives loss and perplexity; use one of these",
    ),
    "a metric of which nobody knows whether more is better": (
        ["train.eval_interval=5", "train.best=mine"],
        "train.best=mine must be one of loss, perplexity, nll, accuracy, top-1, top-5, bleu, or another metric as min:",
    ),
    "nothing is held out": (
        ["train.eval_interval=5", "data.split='1,0,0'"],
        "train.eval_interval=5 evaluates on the valid split, but data.split=1,0,0 gives it no documents; give it some",
    ),
    "the best of checkpoints that are not saved": (
        ["train.eval_interval=5", "train.best=loss", "train.checkpoint=false"],
        "train.best=loss needs checkpoints, but train.checkpoint=false saves none; use train.checkpoint=true, or",
    ),
    "a cost without prices": (
        ["train.max_cost=5"],
        "train.max_cost=5 ends a run by the price of its nodes, but cluster.groups.local.price_per_hour is not known",
    ),
    "an evaluation of a rehearsal": (
        ["train.eval_interval=5", "executor.rehearse=virtual"],
        "train.eval_interval=5 is for training, but executor.rehearse=virtual trains nothing; use train.eval_interval=",
    ),
    "momentum of an optimizer without": (
        ["train.momentum=0.8"],
        "train.momentum=0.8 does nothing with train.optimizer=adamw; use train.optimizer=sgd, or leave it out",
    ),
    "Nesterov's momentum without any": (
        ["train.optimizer=sgd", "train.nesterov=true", "train.momentum=0"],
        "train.nesterov=true looks ahead along the momentum, but train.momentum=0; use train.momentum=0.9",
    ),
    "a factor of a policy without steps": (
        ["train.lr_gamma=0.5"],
        "train.lr_gamma=0.5 does nothing with train.lr_policy=cosine; use train.lr_policy=step or exponential",
    ),
    "steps of no length": (
        ["train.lr_policy=step"],
        "train.lr_policy=step multiplies the learning rate by train.lr_gamma=0.1 each time train.lr_step_iterations",
    ),
    "Noam with an end": (
        ["train.lr_policy=noam", "train.lr_decay_iterations=40"],
        "train.lr_decay_iterations=40 does nothing with train.lr_policy=noam, which has no end; use",
    ),
    "a policy without an end decays to nothing": (
        ["train.lr_policy=constant", "train.lr_decay_iterations=40"],
        "train.lr_decay_iterations=null, or train.lr_policy=cosine or polynomial or linear",
    ),
    "Noam without a warm-up": (
        ["train.lr_policy=noam", "train.lr_warmup_iterations=0"],
        "train.lr_policy=noam falls from the end of the warm-up on, but train.lr_warmup_iterations=0; give it",
    ),
    "layers are not the partition's sum": (
        ["parallel.partition=1-4"],
        "parallel.partition=1-4 has 1 + 4 = 5 layers, but model.layers=4; nearest that fits: 1-3",
    ),
    "a layer short, in a plan with empty stages": (
        [SEED, "parallel.partition=0-11-8-8-8-8-4-0"],
        "0 + 11 + 8 + 8 + 8 + 8 + 4 + 0 = 47 layers, but model.layers=48; nearest that fits: 0-12-8-8-8-8-4-0",
    ),
    "both rows of layers of a T5 are counted": (
        ["model=t5-tiny", "parallel.partition=1-4"],
        "parallel.partition=1-4 has 1 + 4 = 5 layers, but model.layers=2 + model.decoder_layers=2 = 4; nearest that "
        "fits: 1-3",
    ),
    "positions that the family does not have": (
        ["model=transformer-tiny", "model.position_embedding_type=rope"],
        "model.position_embedding_type=rope does not go with model.family=transformer; use sinusoidal",
    ),
    "positions that only another family has": (
        ["model.position_embedding_type=sinusoidal"],
        "model.position_embedding_type=sinusoidal does not go with model.family=gpt; use learned_absolute or rope or "
        "none",
    ),
    "an LSTM with an MLP": (
        ["model=gnmt-tiny", "model.ffn_hidden=64"],
        "model.ffn_hidden=64 is for transformers, not for model.family=gnmt; leave it out",
    ),
    "an LSTM with heads": (
        ["model=gnmt-tiny", "model.heads=2"],
        "the attention of model.family=gnmt has one head; use 1",
    ),
    "an LSTM with one layer": (
        ["model=gnmt-tiny", "model.layers=1"],
        "model.layers=1: the encoder of model.family=gnmt",
    ),
    "a language model of LSTMs with attention": (
        ["model=awd-lm-tiny", "model.heads=2"],
        "model.heads=2: model.family=awd_lm has no attention; use 1",
    ),
    "a language model of LSTMs with an MLP": (
        ["model=awd-lm-tiny", "model.ffn_hidden=64"],
        "model.ffn_hidden=64 is only for model.family=gpt, bert, t5, transformer, gnmt, vit, t2t_vit, vgg or alexnet",
    ),
    "a language model of LSTMs with norms": (
        ["model=awd-lm-tiny", "model.norm_epsilon=1e-3"],
        "model.norm_epsilon=0.001 is for transformers, not for model.family=awd_lm; leave it out",
    ),
    "a language model of one LSTM": (
        ["model=awd-lm-tiny", "model.layers=1"],
        "model.layers=1: the first and the last layer of model.family=awd_lm have widths of their own; use 2 or more",
    ),
    "part of a layer without attention computed again": (
        ["model=awd-lm-tiny", "parallel.recompute=selective"],
        "parallel.recompute=selective is for attention, and nothing is known of attention in model.family=awd_lm; use",
    ),
    "a rate of dropout that drops all": (
        ["model=awd-lm-tiny", "model.weight_dropout=1"],
        "model.weight_dropout=1.0 must be at least 0 and less than 1",
    ),
    "weights dropped of a transformer": (
        ["model.weight_dropout=0.5"],
        "model.weight_dropout=0.5 is only for model.family=awd_lm, not for model.family=gpt; leave it out",
    ),
    "a model of videos without features": (
        ["model=s2vt-tiny", "model.features=null"],
        "model.features has no value, which model.family=s2vt needs; give model.features=",
    ),
    "features of text": (["model.features=10"], "model.features=10 is only for model.family=s2vt"),
    "tensor parallel LSTMs": (
        ["model=gnmt-tiny", "parallel=single", "parallel.tensor=2"],
        "parallel.tensor=2",
    ),
    "a decoder that the family does not have": (
        ["model=bert-tiny", "model.decoder_layers=2"],
        "model.decoder_layers=2 is only for model.family=t5, transformer, gnmt or s2vt, not for model.family=bert; "
        "leave it out, or use model.decoder_layers=null",
    ),
    "a decoder's sequence that the family does not have": (
        ["model.decoder_sequence_length=2"],
        "model.decoder_sequence_length=2 is only for model.family=t5, transformer, gnmt or s2vt, not for "
        "model.family=gpt; leave it out",
    ),
    "a binary head that the family does not have": (
        ["model=t5-tiny", "model.bert_binary_head=false"],
        "model.bert_binary_head=false is only for model.family=bert, not for model.family=t5; leave it out, or use "
        "model.bert_binary_head=true",
    ),
    "a head's width that cannot be turned": (
        ["model.kv_channels=7", "model.position_embedding_type=rope"],
        "model.kv_channels=7 is odd, but model.position_embedding_type=rope turns pairs of numbers; use 8, or another",
    ),
    "a tensor group shares the decoder's sequence, too": (
        [
            *("model=t5-tiny", "model.decoder_sequence_length=63", "parallel=single", "parallel.tensor=2"),
            *("parallel.sequence_parallel=true", "parallel.partition=null"),
        ],
        "model.decoder_sequence_length=63 is not divisible by parallel.tensor=2",
    ),
    "stages are not the pipeline size": (
        ["parallel.partition=1-2-1"],
        "parallel.partition=1-2-1 has 3 stages, but parallel.pipeline=2; "
        "use parallel.pipeline=3, or a partition such as 2-2",
    ),
    "one stage is told in the singular": (["parallel.partition=4"], "parallel.partition=4 has 1 stage, but"),
    "parts are not the stages times the chunks": (
        ["parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-3"],
        "parallel.partition=1-3 has 2 parts, but parallel.pipeline * parallel.chunks = 2 * 2 = 4; "
        "use a partition such as 1-1-1-1",
    ),
    "an interleaved schedule has several chunks": (
        ["parallel.schedule=interleaved"],
        "parallel.schedule=interleaved needs parallel.chunks of at least 2, not 1; use parallel.chunks=2, "
        "or parallel.schedule=one_f_one_b",
    ),
    "another schedule has one chunk": (
        ["parallel.schedule=zb_h1", "parallel.chunks=2", "parallel.partition=null"],
        "parallel.chunks=2 needs parallel.schedule=interleaved, not zb_h1, which has one chunk on a stage; "
        "use that, or parallel.chunks=1",
    ),
    "one stage has one chunk": (
        ["parallel.schedule=interleaved", "parallel.chunks=2", "parallel.pipeline=1", "parallel.partition=null"],
        "parallel.chunks=2 needs parallel.pipeline of at least 2, not 1: one stage holds the whole model; "
        "use parallel.chunks=1 and another parallel.schedule, such as one_f_one_b",
    ),
    "a dry run has no metric": (
        ["sweep_metric=train/loss", "dry_run=true"],
        "sweep_metric=train/loss is measured in runs, and dry_run=true starts none; leave one of them out",
    ),
    "Megatron-LM's runs have no metrics file": (
        ["sweep_metric=train/loss", "engine=megatron_lm", "engine.checkout=x"],
        "sweep_metric=train/loss: a run with engine.kind=megatron_lm has no metrics.jsonl, where it is read; use "
        "engine=tdpp, or leave it out",
    ),
    "a metric of evaluations needs evaluations": (
        ["sweep_metric=valid/loss"],
        "sweep_metric=valid/loss is measured in evaluations, and there are none without train.eval_interval; give "
        "it a number of iterations",
    ),
    "a sweep by cost needs prices": (
        ["sweep_metric=cost"],
        "sweep_metric=cost needs the price of every node, and cluster.groups.local.price_per_hour is not known; give "
        "it, in dollars for a node",
    ),
    "a sweep runs one run at a time at least": (["max_jobs=0"], "max_jobs=0 must be at least 1"),
    "runs of this machine that nobody waits for have no limit": (
        ["max_jobs=2", "executor.wait=false"],
        "max_jobs=2 cannot hold with executor.wait=false, which starts all runs on this machine at once; use "
        "executor.wait=true, which runs them one after another, or max_jobs=null",
    ),
    "a limit of GPU-hours is a number": (
        ["confirm_gpu_hours=-1"],
        "confirm_gpu_hours=-1.0 must be a number, 0 or above",
    ),
    "one profiler at a time": (
        ["profile.nsys=true", "profile.ncu=true"],
        "profile.nsys=true and profile.ncu=true: a process runs under one profiler at a time; set one to false",
    ),
    "time between readings of the GPUs": (
        ["profile.gpu_interval_s=-1"],
        "profile.gpu_interval_s=-1 must be at least 0",
    ),
    "a partition is numbers and dashes": (
        ["parallel.partition=2--2"],
        "parallel.partition='2--2' is not a partition: write the transformer layers of each stage joined by dashes",
    ),
    "a partition without limit is not computed": (["parallel.partition=1-99999999999"], "is not a partition"),
    "ranks are more than the GPUs": (
        [SEED, "parallel.data=8"],
        "parallel.tensor * parallel.data * parallel.pipeline = 1 * 8 * 8 = 64 ranks, but the chosen nodes of cluster "
        "'a10x8', gpu2*8, have 32 GPUs; one of these fits: parallel.data=4; 16 nodes (cluster.groups.<group>.count)",
    ),
    "ranks are fewer than the GPUs": (
        [SEED, "parallel.data=2"],
        "1 * 2 * 8 = 16 ranks, but the chosen nodes of cluster 'a10x8', gpu2*8, have 32 GPUs; "
        "one of these fits: parallel.tensor=2; parallel.data=4; 4 nodes",
    ),
    "no single size would fill the nodes": (
        ["cluster.groups.local.gpus_per_node=7"],
        "1 * 2 * 2 = 4 ranks, but the chosen nodes of cluster 'local', local, have 7 GPUs; "
        "change these sizes or the node order",
    ),
    "master and slave nodes are not all nodes": (
        [HET, "parallel.node_order=hgx+gpu2*6"],
        "1 * 4 * 8 = 32 ranks, but the chosen nodes of cluster 'a100x1_a10x7', hgx+gpu2*6, have 28 GPUs",
    ),
    "the order has more nodes than the group": (
        [HET, "parallel.node_order=hgx+gpu2*8"],
        "parallel.node_order=hgx+gpu2*8 has 8 nodes of group 'gpu2', but cluster.groups.gpu2.count=7; use at most 7",
    ),
    "the order names a group that is not there": (
        [HET, "parallel.node_order=dgx+gpu2*7"],
        "parallel.node_order=dgx+gpu2*7 names the node group 'dgx', which cluster 'a100x1_a10x7' has not; "
        "it has: hgx, gpu2",
    ),
    "a node order is groups and counts": (
        [HET, "parallel.node_order=hgx+gpu2*0"],
        "parallel.node_order='hgx+gpu2*0' is not a node order: 'gpu2*0' is neither a group name nor GROUP*COUNT",
    ),
    "the batch is not whole micro-batches": (
        ["parallel.global_batch_size=18"],
        "parallel.global_batch_size=18 is not divisible by parallel.data * parallel.micro_batch_size = 2 * 2 = 4; "
        "nearest that are: 16, 20",
    ),
    "the batch is smaller than one micro-batch each": (
        ["parallel.global_batch_size=3"],
        "parallel.global_batch_size=3 is not divisible by parallel.data * parallel.micro_batch_size = 2 * 2 = 4; "
        "nearest that are: 4",
    ),
    "shares of more replicas than there are": (
        ["parallel.shares=3*2-1*2"],
        "parallel.shares=3*2-1*2 is for 4 replicas, but parallel.data=2; use parallel.data=4, or 2 shares",
    ),
    "shares that are none": (
        ["parallel.shares=3-0"],
        "parallel.shares='3-0' are no shares: '0' is neither a whole number from 1 on nor NUMBER*TIMES; write for "
        "example 3-1 or 3*4-1*4",
    ),
    "shares beyond number": (
        ["parallel.shares=" + "-".join(["1*99999"] * 9)],
        "are no shares: with '1*99999' there are more than 131072 numbers; write for example 3-1 or 3*4-1*4",
    ),
    "replicas beyond number": (
        ["parallel.replicas=1*99999-1*99999"],
        "must be whole numbers by stage joined by dashes",
    ),
    "shares that the batch does not have": (
        ["parallel.shares=6-4"],
        "parallel.shares=6-4 cannot share out parallel.global_batch_size=16 samples in micro-batches of 2: it must be a"
        " multiple of 5 micro-batches, 10 samples; use parallel.global_batch_size=10 or 20, or parallel.shares=5-3",
    ),
    "shares of half micro-batches": (
        ["parallel.shares=1-1", "parallel.global_batch_size=6", "parallel.micro_batch_size=4"],
        "it must be a multiple of 2 micro-batches, 8 samples; use parallel.global_batch_size=8",
    ),
    "tensor sizes of another number of stages": (
        ["parallel.tensor=2-1-1"],
        "parallel.tensor=2-1-1 is for 3 stages, but parallel.pipeline=2; use parallel.pipeline=3, or "
        "parallel.tensor=2-1",
    ),
    "tensor sizes that are none": (
        ["parallel.tensor=2-x"],
        "parallel.tensor=2-x must be a whole number, or whole numbers by stage joined by dashes, with *N for a run of "
        "N stages, such as 2-1 or 2*2-1*4",
    ),
    "a tensor size that is not a whole number": (
        ["parallel.tensor=1.5"],
        "parallel.tensor=1.5 must be a whole number, or",
    ),
    "no tensor size at all": (["parallel.tensor=null"], "parallel.tensor=None must be a whole number, or"),
    "a tensor size of a stage that does not divide the heads": (
        ["parallel.tensor=3-1"],
        "model.heads=4 is not divisible by parallel.tensor=3; nearest parallel.tensor that divide it: 2, 4",
    ),
    "a tensor group over two nodes": (
        [
            *(HET, "executor=slurm", "parallel.data=1", "parallel.global_batch_size=12"),
            *("parallel.pipeline=3", "parallel.partition=16-16-16", "parallel.tensor=1-2-1"),
            *("parallel.replicas=3-1-3", "parallel.node_order=hgx+gpu2", "model.heads=16"),
        ],
        "parallel.tensor=1-2-1 puts a tensor group of stage 1, ranks 3 to 4, over node 0 (hgx) and node 1 (gpu2), but "
        "a tensor-parallel group lies inside one node, and ranks fill the nodes of parallel.node_order stage by "
        "stage; nearest that fits: parallel.tensor=1*3 parallel.replicas=3-2-3",
    ),
    "replicas of which not each gets a micro-batch": (
        ["parallel.replicas=9-1"],
        "parallel.replicas=9-1 has a stage of 9 replicas, but parallel.global_batch_size=16 in micro-batches of 2 "
        "gives 8 of them: not each gets one; use parallel.global_batch_size=18, or parallel.replicas=8-1",
    ),
    "shares of replicas that differ by stage": (
        ["parallel.replicas=2-1", "parallel.shares=1-2"],
        "parallel.shares=1-2 does not go with parallel.replicas=2-1: it is for stages with as many replicas; use "
        "parallel.shares=null, or parallel.replicas=null parallel.data=2",
    ),
    "shares of other than the replicas that all stages have": (
        ["parallel.replicas=3-3", "parallel.shares=3-1"],
        "parallel.shares=3-1 is for 2 replicas, but parallel.replicas=3-3 has 3 in every stage; use 3 shares",
    ),
    "interleaved replicas that differ by stage": (
        ["parallel.replicas=2-1", "parallel.schedule=interleaved"],
        "parallel.schedule=interleaved does not go with parallel.replicas=2-1: it is for stages with as many replicas; "
        "use gpipe, one_f_one_b or zb_h1",
    ),
    "alike stages, written one by one, on other than their ranks": (
        [SEED, "parallel.pipeline=2", "parallel.partition=24-24", "parallel.tensor=2-2", "parallel.replicas=2-2"],
        "parallel.tensor * parallel.data * parallel.pipeline = 2 * 2 * 2 = 8 ranks, but the chosen nodes of cluster",
    ),
    "chunks of replicas that differ by stage": (
        ["parallel.replicas=2-1", "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-1-1-1"],
        "parallel.chunks=2 does not go with parallel.replicas=2-1: it is for stages with as many replicas; use "
        "parallel.chunks=1",
    ),
    "stages that differ on other than their ranks": (
        [SEED, "parallel.pipeline=2", "parallel.partition=24-24", "parallel.replicas=3-2", "parallel.data=1"],
        "tensor size * replicas, stage by stage, = 1 * 3 + 1 * 2 = 5 ranks, but the chosen nodes of cluster",
    ),
    "more replicas than micro-batches": (
        ["parallel.shares=1-3", "parallel.global_batch_size=2"],
        "it must be a multiple of 4 micro-batches, 8 samples; use parallel.global_batch_size=8",
    ),
    "shares and a schedule of one's own": (
        ["parallel.shares=3-1", "parallel.schedule_file=mine.json"],
        "parallel.shares=3-1 does not go with parallel.schedule_file=mine.json, which is for one number of",
    ),
    "Megatron-LM has no shares": (
        ["parallel.shares=3-1", "engine=megatron_lm", "engine.checkout=x"],
        "parallel.shares=3-1: replicas of Megatron-LM take equal numbers of micro-batches; use parallel.shares=null",
    ),
    "tensor does not fit a node": (
        [SEED, "parallel.tensor=8", "parallel.data=1", "parallel.pipeline=4", "parallel.partition=null"],
        "parallel.tensor=8 does not fit cluster.groups.gpu2.gpus_per_node=4: a tensor-parallel group lies inside one "
        "node; nearest that fit: 4",
    ),
    "tensor does not divide the heads": (
        ["parallel.tensor=3"],
        "model.heads=4 is not divisible by parallel.tensor=3; nearest parallel.tensor that divide it: 2, 4",
    ),
    "heads do not divide the hidden size": (
        ["model.heads=5"],
        "model.hidden=64 is not divisible by model.heads=5; nearest model.heads that divide it: 4, 8",
    ),
    **{
        f"{key} must be at least 1": ([f"{key}=0"], f"{key}=0 must be at least 1")
        for key in (
            "model.layers",
            "model.heads",
            "model.vocab_size",
            "parallel.tensor",
            "parallel.data",
            "parallel.pipeline",
            "parallel.chunks",
            "parallel.micro_batch_size",
            "parallel.global_batch_size",
            "train.iterations",
            "train.log_interval",
            "train.keep_checkpoints",
            "train.save_interval",
            "train.comm_timeout_s",
            "executor.time_min",
            "cluster.groups.local.count",
            "cluster.groups.local.gpus_per_node",
        )
    },
    "saving at an interval is saving": (
        ["train.save_interval=5", "train.checkpoint=false"],
        "train.save_interval=5 saves checkpoints, but train.checkpoint=false saves none; use train.checkpoint=true",
    ),
    "a port is one that users may open": (
        ["executor.master_port=80"],
        "executor.master_port=80 must be between 1024 and 65535",
    ),
    "a group's GPU is in the cluster": (
        ["cluster.groups.local.gpu=a10"],
        "cluster.groups.local.gpu=a10 is not in cluster.gpus, which has: cpu",
    ),
    "several nodes have a number of GPUs": (
        ["cluster.groups.local.count=2"],
        "cluster.groups.local.gpus_per_node=null (as many ranks as the plan asks for) needs a cluster of one node; "
        "give the number of GPUs per node",
    ),
    "a GPU has a speed": (
        ["cluster.gpus.cpu.fp16_tflops=0"],
        "cluster.gpus.cpu.fp16_tflops=0.0 must be a number above 0",
    ),
    "a link has a bandwidth": (
        ["cluster.groups.local.inter_gbit_per_s=0"],
        "cluster.groups.local.inter_gbit_per_s=0.0 must be a number above 0",
    ),
    "a latency is not negative": (
        ["cluster.groups.local.intra_latency_us=-1"],
        "cluster.groups.local.intra_latency_us=-1.0 must be a number, 0 or above",
    ),
    "a price is a number": (
        ["cluster.groups.local.price_per_hour=nan"],
        "cluster.groups.local.price_per_hour=nan must be a number, 0 or above",
    ),
    "min_lr is not above lr": (
        ["train.min_lr=0.1"],
        "train.min_lr=0.1 must be between 0 and train.lr=0.003",
    ),
    "lr is a number": (["train.lr=nan"], "train.lr=nan must be a number above 0"),
    "warm-up ends before the iterations": (
        ["train.lr_warmup_iterations=50"],
        "train.lr_warmup_iterations=50 must be at least 0 and less than train.iterations=50",
    ),
    "warm-up ends before the decay": (
        ["train.lr_warmup_iterations=5", "train.lr_decay_iterations=5"],
        "train.lr_warmup_iterations=5 must be at least 0 and less than train.lr_decay_iterations=5",
    ),
    "a beta is below 1": (["train.adam_beta2=1"], "train.adam_beta2=1.0 must be at least 0 and less than 1"),
    "clipping is not negative": (["train.clip_grad=-1"], "train.clip_grad=-1.0 must be a number, 0 or above"),
    "a split is three weights": (["data.split='9,1'"], "data.split='9,1' must be three weights"),
    "a split trains on something": (["data.split='0,1,1'"], "data.split='0,1,1' must be three weights"),
    "corpora have a weight": (["data.weight=-1"], "data.weight=-1.0 must be a number above 0"),
    "other corpora too": (["data.blend=[{prefix:b,weight:0}]"], "data.blend[0].weight=0.0 must be a number above 0"),
    "a corpus is blended once": (
        ["data.prefix=a", "data.blend=[{prefix:b},{prefix:a}]"],
        "data.blend[1].prefix=a is in the blend already",
    ),
    "a corpus is blended once, however its path is written": (
        ["data.prefix=a/b", "data.blend=[{prefix:./a//c/../b}]"],
        "data.blend[0].prefix=./a//c/../b is in the blend already",
    ),
    **{
        f"{key} names something": ([f"{key}=''", *others], f"{key}='' names no file or folder; give the path of one")
        for key, *others in (
            *(["runs_dir"], ["train.load"], ["parallel.schedule_file"], ["data.prefix"], ["cluster.scratch"]),
            ["container.image_dir"],
        )
    },
    "a blank is not a folder": (["runs_dir='  '"], "runs_dir='  ' names no file or folder"),
    "every corpus has a place": (["data.blend=[{weight:2}]"], "data.blend[0].prefix has no value"),
    "a name is not a path": (["name=a/b"], "name='a/b' cannot name a run folder"),
    "a name is not an option": (["name='-x'"], "name='-x' cannot name a run folder"),
    "a name is not the folder of job links": (["name=by_job"], "name='by_job' cannot name a run folder"),
    "a name is one printable line": (["name='a\tb'"], r"name='a\tb' cannot name a run folder"),
    "a name is not blank": (["name=' '"], "name=' ' cannot name a run folder"),
    "a missing value is named": (["data.prefix=???"], "data.prefix has no value: give data.prefix=…"),
    "a reference that leads nowhere is named": (
        ["name=${nope}"],
        "name cannot be resolved: Interpolation key 'nope' not found; give name=…",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_names_keys_values_and_what_would_hold(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(overrides)


@pytest.mark.parametrize("name", ["tiny", "two words", 'it\'s "it"', "größe", "2026", "a=b"])
def test_a_run_may_have_any_name_that_is_a_folder_name(demo: Experiment, name: str) -> None:
    assert replace(demo, name=name).name == name


@pytest.fixture(scope="module")
def demo() -> Experiment:
    return compose(["experiment=demo"])


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 4096))
def test_the_batches_proposed_are_divisible_and_the_nearest(data: int, micro: int, batch: int) -> None:
    assume(batch % (data * micro))
    with pytest.raises(ConfigError) as caught:
        Parallel(data=data, micro_batch_size=micro, global_batch_size=batch)
    proposed = [int(n) for n in str(caught.value).rpartition(": ")[2].split(", ")]
    for value in proposed:
        Parallel(data=data, micro_batch_size=micro, global_batch_size=value)
    legal = range(data * micro, batch + 2 * data * micro, data * micro)
    nearest = min(abs(value - batch) for value in legal)
    assert min(abs(value - batch) for value in proposed) == nearest


@given(st.lists(st.integers(0, 20), min_size=2, max_size=2), st.integers(1, 40))
def test_the_partition_proposed_is_accepted(demo: Experiment, parts: list[int], layers: int) -> None:
    assume(sum(parts) != layers)
    parallel = replace(demo.parallel, partition=None)
    whole = replace(demo, model=replace(demo.model, layers=layers), parallel=parallel)
    with pytest.raises(ConfigError) as caught:
        replace(whole, parallel=replace(parallel, partition="-".join(map(str, parts))))
    proposed = str(caught.value).rpartition("nearest that fits: ")[2]
    assert replace(whole, parallel=replace(parallel, partition=proposed)).partition.layers


@given(
    st.integers(1, 8), st.integers(1, 8), st.sampled_from((1, 2, 4)), st.integers(1, 8), st.sampled_from((1, 2, 4, 8))
)
def test_the_parallel_sizes_proposed_are_accepted(
    demo: Experiment, data: int, pipeline: int, tensor: int, nodes: int, per_node: int
) -> None:
    assume(data * pipeline * tensor != nodes * per_node)
    group = replace(demo.cluster.groups["local"], count=nodes, gpus_per_node=per_node)
    cluster = replace(demo.cluster, groups={"local": group})
    parallel = Parallel(tensor=tensor, data=data, pipeline=pipeline, global_batch_size=840)
    with pytest.raises(ConfigError) as caught:
        replace(demo, cluster=cluster, parallel=parallel)
    for key, value in re.findall(r"parallel\.(\w+)=(\d+)", str(caught.value)):
        assert replace(demo, cluster=cluster, parallel=replace(parallel, **{key: int(value)}))


def test_a_schedule_of_ones_own_may_have_chunks() -> None:
    own = ["parallel.schedule_file=mine.json", "parallel.chunks=2", "parallel.partition=0-2-1-1"]
    assert compose(own).partition.layers == (0, 2, 1, 1)


def test_an_even_partition_counts_the_chunks() -> None:
    chunks = ["parallel.schedule=interleaved", "parallel.chunks=3", "parallel.partition=null", "model.layers=8"]
    assert compose(chunks).partition.layers == (2, 2, 1, 1, 1, 1)


def test_a_cluster_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("cluster.groups of cluster 'bare' is empty")):
        Cluster(name="bare")


def test_a_group_name_can_be_written_in_a_node_order() -> None:
    gpu = Gpu(name="G", memory_gib=1, fp32_tflops=1, fp16_tflops=1, bf16_tflops=1, memory_gb_per_s=1)
    links = {"intra_gbit_per_s": 1, "intra_latency_us": 0, "inter_gbit_per_s": 1, "inter_latency_us": 0}
    group = NodeGroup(gpus_per_node=1, gpu="g", **links)
    with pytest.raises(ConfigError, match=re.escape("'a+b' is not a group name")):
        Cluster(name="c", gpus={"g": gpu}, groups={"a+b": group})


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["train.compile=true", "parallel.schedule=zb_h1"],
            "train.compile=true does not go with parallel.schedule=zb_h1",
        ),
        (
            ["experiment=seed_a10x8", "executor.rehearse=virtual"],
            "executor.rehearse=virtual goes through the plan on this machine, but executor.kind=slurm",
        ),
        (
            ["experiment=seed_a10x8", "cluster.groups.gpu2.time_min=2"],
            "cluster.groups.gpu2.time_min=2 is not more than executor.save_s=120 seconds",
        ),
        (["executor.meet_min=0"], "executor.meet_min=0.0 must be a number above 0"),
        (["executor.save_s=1"], "executor.save_s=1 must be between 10 and 65535"),
        (["train.seed=-1"], "train.seed=-1 must be between 0 and 4294967295"),
        (["train.seed=4294967296"], "train.seed=4294967296 must be between 0 and 4294967295"),
        (
            ["parallel.tensor=2", "parallel.data=1", "parallel.sequence_parallel=true", "model.sequence_length=127"],
            "model.sequence_length=127 is not divisible by parallel.tensor=2",
        ),
    ],
    ids=[
        "compiled-zero-bubble",
        "rehearsed-on-slurm",
        "no-time-to-train",
        "no-time-to-meet",
        "no-time-to-save",
        "negative-seed",
        "large-seed",
        "sequence",
    ],
)
def test_what_does_not_go_together_is_told(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    assert told in str(error.value)
