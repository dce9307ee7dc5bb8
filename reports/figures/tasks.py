"""How each task of a timeline looks, in pages and notebooks alike: its lane, and its colour by day and by night.

Forward is blue and backward orange wherever they are; the rest has hues that stay apart for the common kinds of colour
blindness (after Okabe and Ito 2008). Lanes tell apart what hues cannot. Beside the names of tdpp's engine these are the
timers of Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass

COMMUNICATION, COMPUTATION, DATA = LANES = ("communication", "computation", "data and loss")
"""From above to below."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a rank's row, which goes from -0.5 (above) to 0.5 (below)."""

    lane: str
    top: float
    bottom: float


SEND = Place(lane=COMMUNICATION, top=-0.44, bottom=-0.31)
RECEIVE = Place(lane=COMMUNICATION, top=-0.29, bottom=-0.12)
COMPUTE = Place(lane=COMPUTATION, top=-0.1, bottom=0.26)
ACROSS = Place(lane=COMMUNICATION, top=RECEIVE.top, bottom=COMPUTE.bottom)
"""Communication for which computation stands still: it covers what it lies inside."""
INSIDE = Place(lane=COMPUTATION, top=-0.02, bottom=0.18)
BELOW = Place(lane=DATA, top=0.29, bottom=0.43)


@dataclass(frozen=True)
class Look:
    """How a task is drawn."""

    place: Place
    light: str
    dark: str


TASKS = {
    "forward-send": Look(SEND, "#4f9fd0", "#58a6d6"),
    "backward-send": Look(SEND, "#d8a03c", "#c9963c"),
    "forward-recv": Look(RECEIVE, "#bcd9ec", "#2f4f66"),
    "backward-recv": Look(RECEIVE, "#f3d9b8", "#6b4f2a"),
    "forward-send-forward-recv": Look(RECEIVE, "#8fbfe0", "#3c6f94"),
    "backward-send-backward-recv": Look(RECEIVE, "#e8bd85", "#8a6433"),
    "forward-send-backward-recv": Look(RECEIVE, "#dcb9d8", "#7a5477"),
    "backward-send-forward-recv": Look(RECEIVE, "#a9cfc4", "#3f6f62"),
    "forward-backward-send-forward-backward-recv": Look(RECEIVE, "#a9a9b8", "#5d5d70"),
    "grads-all-reduce": Look(RECEIVE, "#a5549b", "#c07ab6"),
    "layernorm-grads-all-reduce": Look(RECEIVE, "#c98bc2", "#8f4f86"),
    "embedding-grads-all-reduce": Look(RECEIVE, "#6d2a66", "#e6b3de"),
    "grads-reduce-scatter": Look(RECEIVE, "#8c4a9e", "#a98bd0"),
    "overlapped-grads-all-reduce": Look(SEND, "#c79ac2", "#7d4a77"),
    "tensor-all-reduce": Look(ACROSS, "#008c95", "#35b8c0"),
    "tensor-all-gather": Look(ACROSS, "#00636b", "#7fd9de"),
    "tensor-reduce-scatter": Look(ACROSS, "#5fb3b3", "#1b7f86"),
    "grad-norm-all-reduce": Look(ACROSS, "#93679e", "#b48cc4"),
    "params-all-gather": Look(ACROSS, "#4d3f9e", "#8f86ff"),
    "islands-all-reduce": Look(ACROSS, "#2f6db5", "#6fa8ea"),
    "forward-compute": Look(COMPUTE, "#0067a5", "#3f9ae0"),
    "backward-compute": Look(COMPUTE, "#cf5a00", "#ef7d22"),
    "backward-input-compute": Look(COMPUTE, "#e06d1c", "#ff9a4d"),
    "backward-weight-compute": Look(COMPUTE, "#7a3a08", "#f9c795"),
    "optimizer": Look(COMPUTE, "#00875f", "#1fae83"),
    "optimizer-copy-to-main-grad": Look(INSIDE, "#b9e3d2", "#0a4736"),
    "optimizer-unscale-and-check-inf": Look(INSIDE, "#d6c27a", "#6f6428"),
    "optimizer-clip-main-grad": Look(INSIDE, "#7fd0b3", "#0c5c44"),
    "optimizer-count-zeros": Look(INSIDE, "#9aa7b5", "#4c5866"),
    "optimizer-inner-step": Look(INSIDE, "#35a583", "#6fd3b4"),
    "optimizer-copy-main-to-model-params": Look(INSIDE, "#5f7d2c", "#b7d67a"),
    "batch-generator": Look(BELOW, "#6f7782", "#98a1ad"),
    "post-process": Look(BELOW, "#a1683a", "#d6a377"),
    "loss-compute": Look(BELOW, "#b3a000", "#e2d44a"),
}
OTHER = Look(BELOW, "#444444", "#cccccc")


def look(name: str) -> Look:
    """Returns how the task of this name is drawn."""
    return TASKS.get(name, OTHER)
