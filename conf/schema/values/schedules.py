"""The orders of forward and backward passes, the versions of weights that they meet, what is recomputed, and how
gradients are summed."""

from __future__ import annotations

from enum import StrEnum


class Schedule(StrEnum):
    """In which order a stage takes its forward and backward passes (megatron_ext/contract/schedule/schedules.py)."""

    gpipe = "gpipe"
    """All forward, then all backward."""
    one_f_one_b = "one_f_one_b"
    """1F1B: one forward, one backward pass in turn. A stage holds at most one micro-batch more than there are stages
    after it."""
    interleaved = "interleaved"
    """Interleaved 1F1B over several chunks of the model per stage: a smaller bubble for more messages and memory."""
    zb_h1 = "zb_h1"
    """1F1B that computes weight gradients where it would wait (ZB-H1): a smaller bubble; no stage holds more than the
    first one."""
    model_parallel = "model_parallel"
    """No overlap: a micro-batch passes through all stages and back before the next one starts. Never the fastest."""
    pipedream = "pipedream"
    """1F1B without a flush: stages update their weights independently and keep older versions of them."""

    @property
    def label(self) -> str:
        """The schedule's name in the literature, for tables, sentences and pages; files keep the key."""
        return _LABELS[self]

    @property
    def has_chunks(self) -> bool:
        """Whether a stage has several chunks of the model."""
        return self is Schedule.interleaved

    @property
    def forward_first(self) -> bool:
        """Whether all forward passes come before the first backward pass."""
        return self is Schedule.gpipe

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of the weights are a pass of their own, for which no other stage waits."""
        return self is Schedule.zb_h1

    @property
    def input_share(self) -> float:
        """The part of a backward pass that the stage before waits for, as predictions have it."""
        return 0.5 if self.splits_backward else 1.0


_LABELS = {
    Schedule.gpipe: "GPipe",
    Schedule.one_f_one_b: "1F1B",
    Schedule.interleaved: "interleaved 1F1B",
    Schedule.zb_h1: "ZB-H1",
    Schedule.model_parallel: "model parallelism",
    Schedule.pipedream: "PipeDream",
}


class Semantics(StrEnum):
    """Which version of a stage's weights a micro-batch meets (megatron_ext/contract/schedule/streams.py)."""

    stashing = "stashing"
    """The newest version at the forward pass; the backward pass uses the same one."""
    vertical = "vertical"
    """Versions that have learned from the same micro-batches on all stages, in both passes."""
    latest = "latest"
    """The newest version in each pass: no memory for versions, but inexact gradients."""
    two = "two"
    """The version before the newest, in both passes (PipeDream-2BW); needs an `update_every` of at least the depth."""


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass, to save their memory."""

    none = "none"
    selective = "selective"
    """Only the attention core."""
    full = "full"
    """Everything except each layer's input."""


class ReduceDtype(StrEnum):
    """Number format in which replicas send each other gradients to sum; each adds up its own micro-batches in fp32."""

    fp32 = "fp32"
    bf16 = "bf16"
    """Half the bytes, for sums that are rounded to 8 bits, and 2 bytes of memory for a parameter."""
