"""Where a node's worker runs: on the host, or in the node's container. It makes of the worker's command the process to
start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from conf.schema.experiment import ContainerKind
from launch.machine import slurm_commands
from launch.machine.container_commands import Command, RunContainer, SlurmStep, inherited_by_runtime, start
from launch.node.container_setup import Setup
from launch.node.worker_command import scrubbed


def process_to_start(
    container: RunContainer | None,
    name: str,
    command: Sequence[str],
    given: Mapping[str, str],
    inherited: Mapping[str, str],
    step: SlurmStep | None,
) -> Command:
    """The worker's process, with its whole environment.

    `name` is the node's container, `given` what run and node give the worker, `inherited` the agent's own environment.
    """
    kept = scrubbed(inherited)
    if container is None:
        return Command(tuple(command), kept | dict(given))
    kept = inherited_by_runtime(kept)
    if container.kind is not ContainerKind.pyxis:  # enroot's hook for PyTorch would make of them RANK, MASTER_ADDR, …
        kept = slurm_commands.environment(kept)
    started = start(container, name, given, command, step)
    return replace(started, environment=kept | dict(started.environment))


class Workplace:
    """This node's. It is left only when the worker has ended: until then the container is held for it."""

    def __init__(self, container: RunContainer | None, node_rank: int, het_group: int | None) -> None:
        self._container = container
        self._setup = None if container is None else Setup(container, node_rank)
        self._het_group = het_group

    def ready(self) -> bool:
        """Goes on with what makes it ready, without waiting; if it is not yet, call again soon.

        Raises:
            LaunchError: it cannot be made ready.
        """
        return self._setup is None or self._setup.step()

    @property
    def doing(self) -> str | None:
        """What it waits for; None when it is ready."""
        return None if self._setup is None else self._setup.doing

    @property
    def image(self) -> str | None:
        """The ID of docker's image, once it is ready; None with other runtimes."""
        return None if self._setup is None else self._setup.image

    def process(self, command: Sequence[str], given: Mapping[str, str], inherited: Mapping[str, str]) -> Command:
        """See `process_to_start`; once it is ready."""
        name = "" if self._setup is None else self._setup.name
        in_step = self._container is not None and self._container.kind is ContainerKind.pyxis
        step = SlurmStep.own(inherited, self._het_group) if in_step else None
        return process_to_start(self._container, name, command, given, inherited, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._setup is not None:
            self._setup.close()
