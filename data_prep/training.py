"""Whether data can feed a run, whatever kind of data its model learns from."""

from __future__ import annotations

from pathlib import Path

from conf.schema.experiment import Experiment
from data_prep.chats.check import check_documents, samples_of_documents
from data_prep.errors import DataPrepError, named
from data_prep.images.check import check_images
from data_prep.indexed.check import check_text, order_of_text, samples_of_split
from data_prep.kinds import kind_for, require_kind
from data_prep.pairs.check import check_pairs
from data_prep.videos.check import check_videos
from megatron_ext.contract.models.model import IMAGES, PAIRS, TEXT, VIDEOS
from megatron_ext.data.pairs import Pairs
from megatron_ext.data.vision.images import open_images
from megatron_ext.data.vision.videos import fitting, open_videos


def check_for_training(experiment: Experiment) -> list[str]:
    """Checks that the data can feed this experiment; returns what is odd about that, in words. Raises DataPrepError:
    the data are of another kind, missing, damaged, or nothing that the model can learn from."""
    family, data = str(experiment.model.family), experiment.data
    for number, corpus in enumerate(data.corpora()):
        require_kind(Path(corpus.prefix), family, f"data.blend[{number - 1}].prefix" if number else "data.prefix")
    kind = kind_for(family)
    if kind == TEXT and data.documents() is not None:
        return check_documents(experiment)
    if kind == TEXT:
        return check_text(experiment)
    if data.blend:
        raise DataPrepError(f"data.blend mixes text alone, but model.family={family} learns from {kind}; leave it out")
    prefix = Path(data.prefix)
    if kind == PAIRS:
        return check_pairs(experiment.model, prefix)
    if kind == VIDEOS:
        return check_videos(experiment.model, prefix)
    assert kind == IMAGES
    check_images(experiment.model, prefix)
    return []


def samples_in_split(experiment: Experiment, split: str) -> int | None:
    """How many samples a split of the data has before any of them comes again; None where no number says that. Raises
    DataPrepError: the split cannot be used, or has no sample."""
    kind, model, prefix = kind_for(str(experiment.model.family)), experiment.model, Path(experiment.data.prefix)
    if kind == TEXT and experiment.data.documents() is not None:
        return samples_of_documents(experiment, split)
    if kind == TEXT:
        return samples_of_split(experiment, split)
    with named(f"data.prefix={prefix}"):
        if kind == IMAGES:
            return len(open_images(prefix, split).images)
        if kind == VIDEOS:
            return len(fitting(open_videos(prefix, split), model.sized(1), prefix))
        return len(Pairs(prefix, split, model.sequence_length, model.sized(1).decoder_tokens).kept)


def known_order(experiment: Experiment, samples: int) -> dict[str, float]:
    """What is known of `Samples.order` before the ranks of a run make so many samples for its training."""
    text = not experiment.model.traits.user_code and kind_for(str(experiment.model.family)) == TEXT
    if text and experiment.data.documents() is None:
        return order_of_text(experiment, samples)
    return {"seed": experiment.train.seed}
