"""The commands of `tdpp`, a module each with a `main(argv)`; they alone may know every room."""

COMMANDS = {
    "launch": "start an experiment, or with -m a sweep of them",
    "doctor": "check the machines of an experiment before it is launched",
    "status": "judge a run: the verdict, then the evidence",
    "logs": "print what the nodes of a run wrote",
    "stop": "end a run, and everything that belongs to it",
    "runs": "list the runs with their verdicts",
    "clean": "remove what runs have left behind: unfinished launches, images, containers, locks",
    "search": "find the best plan for a cluster and a model",
    "simulate": "play a whole training whose batch adapts on many sets of nodes: time and dollars of each",
    "rehearse": "train a small model under the delays of plans, and rank them by time to quality",
    "profile": "measure what models and messages take on a cluster's GPUs",
    "evaluate": "measure a run's loss, metrics and BLEU on held-out data",
    "translate": "translate text with a trained run, or export its model",
    "report": "show runs as a page",
    "init": "write your cluster and a first experiment from what Slurm and the nodes say",
    "config": "explain the keys of a configuration",
    "data": "turn text into indexed data, and inspect it",
    "completion": "let a shell complete commands, groups, keys, values and runs",
}
"""What each does, by the name that it shares with its module."""
