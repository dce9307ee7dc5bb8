"""`parallel.streams`: copies of the model on a GPU, which share its weights and run micro-batches beside each other."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.schema.values.partition import numbers_in
from conf.visible import plural

AUTO = "auto"
"""A launch is to choose them."""
MOST = 64
"""Copies on one GPU."""


def by_replica(text: str | None, replicas: int) -> tuple[int, ...]:
    """By replica; where they are still to be chosen, 1 each.

    Raises:
        ConfigError: the text does not say that.
    """
    try:
        numbers = (1,) if text is None or text == AUTO else numbers_in(text)
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= MOST for number in numbers):
        raise ConfigError(
            f"parallel.streams={text} must be a number from 1 to {MOST}, or one for each replica, such as "
            "3-1 or 3*4-1*4, or auto"
        )
    if len(numbers) == 1:
        return numbers * replicas
    if len(numbers) != replicas:
        raise ConfigError(
            f"parallel.streams={text} is for {plural(len(numbers), 'replica')}, but parallel.data={replicas}; "
            "give one number, or one per replica"
        )
    return numbers
