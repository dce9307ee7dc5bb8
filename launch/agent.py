"""The old name of `launch.node.agent`: jobs that were queued before it moved have it in their pickles."""

from launch.node.agent import NodeAgent as NodeAgent
