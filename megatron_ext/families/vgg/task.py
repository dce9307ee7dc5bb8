"""VGG: its description says all that is its own."""

from __future__ import annotations

from megatron_ext.tasks.images.image_task import StackedTask

TASK = StackedTask
