"""The old names of what pickles of jobs hold that were queued before it moved.

A pickle has the agent first, and so loads this module before it looks for the others.
"""

import sys

from conf import schema
from conf.run_folder import rundir
from conf.schema import containers
from conf.schema.experiment import ContainerKind
from launch.control import megatron_lm, profilers
from launch.machine import container_commands
from launch.node import worker_command
from launch.node.agent import NodeAgent as NodeAgent

vars(schema)["ContainerKind"] = ContainerKind
sys.modules |= {
    "conf.containers": containers,
    "conf.rundir": rundir,
    "launch.container": container_commands,
    "launch.megatron_lm": megatron_lm,
    "launch.profilers": profilers,
    "launch.worker": worker_command,
}
