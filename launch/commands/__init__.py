"""The commands of `tdpp`, a module each with a `main(argv)`, which returns the exit code and raises TdppError for what
a user can mend; they alone may know every room."""

from importlib import import_module
from types import ModuleType

COMMANDS = {
    "launch": "start an experiment, or with -m a sweep of them",
    "doctor": "check the machines of an experiment before it is launched",
    "status": "judge a run: the verdict, then the evidence",
    "logs": "print what the nodes of a run wrote",
    "stop": "end a run and everything that belongs to it",
    "runs": "list the runs with their verdicts",
    "nodes": "show the machines over all runs: healthy, slow and failing ones",
    "clean": "remove what runs have left behind: unfinished launches, images, containers, locks",
    "search": "find the best plan for a cluster and a model",
    "simulate": "simulate a whole training with an adaptive batch on many sets of nodes; show the time and cost of "
    "each",
    "rehearse": "train a small model with the delays of several plans, and rank the plans by time to quality",
    "profile": "measure how long a model's layers and messages take on a cluster's GPUs",
    "evaluate": "measure a run's loss, metrics and BLEU on held-out data",
    "translate": "translate text with a trained run, or export its model",
    "generate": "continue a text with a trained run",
    "checkpoint": "give a run's weights to other programs, such as transformers and Megatron-LM",
    "report": "write pages that show runs, or serve them to a browser",
    "init": "describe your cluster and write a first experiment, or import a model from Hugging Face",
    "config": "explain the keys of a configuration",
    "data": "turn text, chats, pairs, images and videos into training data, and inspect it",
    "completion": "set up Tab completion in bash, zsh or fish",
}
"""What each does, by the name that it shares with its module."""


def module_of(command: str) -> ModuleType:
    """The module of one of `COMMANDS`; it is imported here, and no other one."""
    return import_module(f"launch.commands.{command}")
