"""Whether indexed data can be used, before a run depends on them."""

from __future__ import annotations

from pathlib import Path

from conf.schema import Experiment
from data_prep.errors import DataPrepError
from data_prep.manifest import read_manifest
from megatron_ext.errors import DataError
from megatron_ext.index_maps import require_one_sample, split_documents
from megatron_ext.indexed_dataset import IndexedDataset, data_file


def check_for_training(experiment: Experiment) -> None:
    """Checks that `data.prefix` can feed this experiment.

    Raises:
        DataPrepError: the files are missing, damaged, of another vocabulary, or too short for one sample.
    """
    prefix = Path(experiment.data.prefix)
    for suffix in (".bin", ".idx"):
        if not data_file(prefix, suffix).is_file():
            raise DataPrepError(
                f"data.prefix={prefix}: {data_file(prefix, suffix)} is not there; 'tdpp data prepare --source stdlib "
                "--output data/stdlib' makes data to try with; for your own, set data.prefix to their path without .bin"
            )
    data = open_checked(prefix)
    manifest = read_manifest(prefix)
    model = experiment.model
    if manifest is not None and manifest.vocab_size > model.vocab_size:
        raise DataPrepError(
            f"data.prefix={prefix} was made with a vocabulary of {manifest.vocab_size} ({manifest.tokenizer}), but "
            f"model.vocab_size={model.vocab_size}; set model.vocab_size={manifest.vocab_size}, or choose other data"
        )
    weights = [float(weight) for weight in experiment.data.split.split(",")]
    train = split_documents(weights, len(data))[0]
    try:
        require_one_sample(data, train, "train", model.sequence_length)
    except DataError as error:
        raise DataPrepError(f"data.prefix={prefix}: {error}") from error


def open_checked(prefix: Path) -> IndexedDataset:
    """Opens indexed data; opening checks them in full.

    Raises:
        DataPrepError: they cannot be used.
    """
    try:
        return IndexedDataset(prefix)
    except DataError as error:
        raise DataPrepError(f"data.prefix={prefix}: {error}") from error
