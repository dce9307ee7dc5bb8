"""What training needs of the rest of an experiment: processes that train, and data to evaluate on."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.schema.data import Data
from conf.schema.executor import Executor, Rehearse
from conf.schema.model import Model
from conf.schema.train import Train, check_metrics


def check(train: Train, model: Model, data: Data, executor: Executor) -> None:
    """Whether a run trains, where keys are for training, and has data to evaluate on, where it evaluates."""
    for key in ("eval_interval", "max_cost"):
        value = getattr(train, key)
        if value is not None and executor.rehearse is not Rehearse.none:
            raise ConfigError(
                f"train.{key}={value} is for training, but executor.rehearse={executor.rehearse} trains "
                f"nothing; use train.{key}=null"
            )
    if train.epochs is not None and executor.rehearse is not Rehearse.none:
        raise ConfigError(
            f"train.epochs={train.epochs} counts the samples of the data, but executor.rehearse="
            f"{executor.rehearse} reads none; use train.iterations or train.samples"
        )
    if train.eval_interval is None:
        return
    check_metrics(train, str(model.family))
    if model.traits.splits_documents and not float(data.split.split(",")[1]):
        raise ConfigError(
            f"train.eval_interval={train.eval_interval} evaluates on the valid split, but data.split="
            f"{data.split} gives that split no documents; give it some, such as data.split=969,30,1"
        )
