"""Whether data can feed a run, whatever kind of data its model learns from."""

from __future__ import annotations

from pathlib import Path

from conf.schema.experiment import Experiment
from data_prep.errors import DataPrepError
from data_prep.images.check import check_images
from data_prep.indexed.check import check_text
from data_prep.kinds import IMAGES, PAIRS, TEXT, kind_for, require_kind
from data_prep.pairs.check import check_pairs


def check_for_training(experiment: Experiment) -> list[str]:
    """Checks that the data can feed this experiment; returns what is odd about that, in words.

    Raises:
        DataPrepError: the data are of another kind, missing, damaged, or nothing that the model can learn from.
    """
    family, data = str(experiment.model.family), experiment.data
    for number, corpus in enumerate(data.corpora()):
        require_kind(Path(corpus.prefix), family, f"data.blend[{number - 1}].prefix" if number else "data.prefix")
    kind = kind_for(family)
    if kind == TEXT:
        return check_text(experiment)
    if data.blend:
        raise DataPrepError(f"data.blend mixes text alone, but model.family={family} learns from {kind}; leave it out")
    prefix = Path(data.prefix)
    if kind == PAIRS:
        return check_pairs(experiment.model, prefix)
    assert kind == IMAGES
    check_images(experiment.model, prefix)
    return []
