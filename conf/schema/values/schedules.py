"""The orders of forward and backward passes, the versions of weights that they meet, what is recomputed, and how
gradients are summed."""

from __future__ import annotations

from enum import StrEnum

from megatron_ext.contract.schedule.schedules import SCHEDULES, PipelineSchedule


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
    def definition(self) -> PipelineSchedule:
        """What it is: its actions, memory and bounds."""
        return SCHEDULES[self]

    @property
    def label(self) -> str:
        """Its name in the literature, for tables, sentences and pages; files keep the key."""
        return self.definition.label


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
