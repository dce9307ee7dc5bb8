"""Whether a model of transformers can be trained as its plan says: ranks would find out only once they have started."""

from __future__ import annotations

from dataclasses import asdict

from conf.blocks_of_module import digest_of
from conf.schema.experiment import ContainerKind, Experiment
from conf.torch_answers import ERROR, FAILED, answer, has_transformers
from launch.errors import LaunchError

CHECK = "megatron_ext.check"


def check_model(experiment: Experiment) -> list[str]:
    """Returns what only the ranks can tell.

    Raises:
        TdppError: transformers has no such model, or tdpp cannot train it in this layout, with these adapters, or with
            packed documents.
    """
    model, parallel, train = experiment.model, experiment.parallel, experiment.train
    if model.config is None:
        return []
    if experiment.container.kind is not ContainerKind.none or not has_transformers():
        return [f"model.config={model.config} is checked when the run starts, on its nodes"]
    documents = experiment.data.documents()
    adapters = {key: getattr(train, key) for key in ("lora_rank", "lora_alpha", "lora_targets")}
    tensors = sorted(set(parallel.layout.tensors))
    request = {
        "model": asdict(model.sized(1)),
        "train": {"seed": 1, "precision": str(train.precision), **adapters},
        "pipeline": len(tensors),
        "tensors": tensors,
        "data_documents": documents and asdict(documents),
    }
    found = answer(CHECK, request, digest_of(model))
    if ERROR in found:
        raise LaunchError(found[ERROR])
    if FAILED in found:
        return [f"model.config={model.config} is checked when the run starts, on its nodes: {found[FAILED]}"]
    if not found["tried"]:
        return [f"data.packing=true: whether model.config={model.config} keeps documents apart is tried on the nodes"]
    return []
