"""S2VT by itself: its sizes, what it sees of a video, and how it begins."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from conf.compose import compose
from conf.schema.experiment import Recompute, Schedule
from fasop.search.space.choices import runnable
from megatron_ext.contract.errors import DataError
from megatron_ext.contract.models.counts import flops_per_sample, parameter_count
from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import Split
from megatron_ext.data.vision.videos import VideoSamples, open_videos
from megatron_ext.families.tasks import stage_of, task_of
from megatron_ext.measuring.passes import Parts
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.megatron_ext.engine.test_s2vt_agrees import MODELS
from tests.support.megatron_ext.engine_run import VOCAB, make_run
from tests.support.megatron_ext.known_sizes import assert_sizes_known
from tests.support.megatron_ext.videos import FEATURES, write_videos


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_videos(tmp_path_factory.mktemp("videos"), VOCAB)


@pytest.fixture
def planned(tmp_path: Path, videos: Path) -> Callable[..., Plan]:
    return lambda *overrides: make_run(tmp_path / str(len([*tmp_path.iterdir()])), videos, *overrides).plan


def test_it_has_the_weights_of_torchs_lstms_and_the_operations_of_their_matrices() -> None:
    model = compose(["model=s2vt", "parallel.partition=null"]).model.sized(1)
    layers = [nn.LSTM(500, 1000), nn.LSTM(1500, 1000)]
    lstms = sum(one.numel() for layer in layers for one in layer.parameters())
    others = 4096 * 500 + 500 + 13000 * 500 + 13000 * 1000 + 13000
    assert parameter_count(model) == lstms + others
    matrices = sum(one.numel() for layer in layers for one in layer.parameters() if one.dim() > 1)
    assert flops_per_sample(model) == 3 * 2 * (80 * matrices + 60 * 4096 * 500 + 20 * 13000 * 1000)


@pytest.mark.parametrize("model", MODELS)
def test_sizes_known_without_torch_are_those_of_the_blocks(planned: Callable[..., Plan], model: str) -> None:
    plan = planned(*MODELS[model])
    task, sized = task_of(plan), plan.model
    assert_sizes_known(task, sized)
    assert [block.name for block in task.blocks if block.placement.name == "COUNTED"] == [
        sized.block_name(number) for number in range(sized.counted)
    ]


def test_a_word_is_written_from_all_frames_and_the_words_before_it(planned: Callable[..., Plan]) -> None:
    plan = planned(*MODELS["one"])
    stage = stage_of(plan, 0, TensorGroup()).eval()
    inputs = task_of(plan).example(2, torch.Generator().manual_seed(0)).inputs
    before = stage(inputs)["logits"]
    words = inputs["text_dec"].clone()
    words[:, 4] = (words[:, 4] + 1) % VOCAB
    after = stage({**inputs, "text_dec": words})["logits"]
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert not torch.allclose(after[:, 4:], before[:, 4:], atol=1e-6)
    frames = inputs["frames"].clone()
    frames[:, -1] += 1
    assert not torch.allclose(stage({**inputs, "frames": frames})["logits"][:, 0], before[:, 0], atol=1e-6)


def test_weights_begin_in_the_ranges_of_torchs_layers(planned: Callable[..., Plan]) -> None:
    for name, one in stage_of(planned(*MODELS["two"], "model.hidden=64"), 0, TensorGroup()).parameters_by_name():
        if name == "head.bias":
            assert not one.any()
            continue
        limit = 1 / 8 if ".lstm." in name else FEATURES**-0.5 if ".frame." in name else 0.1
        assert one.abs().max() <= limit
        assert one.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.25)


def test_frames_are_taken_at_equal_distances_and_captions_lie_beside_their_video(
    planned: Callable[..., Plan], videos: Path
) -> None:
    model, found = planned(*MODELS["one"]).model, open_videos(videos, "train")
    samples = VideoSamples(videos, Split(100, 1), model)
    assert samples.in_epoch == len(found.videos)
    first, second = ([samples.sample(n)["labels"].tobytes() for n in range(e * 18, e * 18 + 18)] for e in (0, 1))
    assert sorted(first) == sorted(second) and first != second
    for video in range(len(found.starts) - 1):
        own = np.array(found.frames[found.starts[video] : found.starts[video + 1]])
        places = [int((k + 0.5) * len(own) / 7) for k in range(7)]
        np.testing.assert_array_equal(found.look(video, 7), own[places])
    for number in range(18):
        sample = samples.sample(number)
        words = sample["labels"][: sample["loss_mask"].sum() - 1].tolist()
        about = [int(found.videos[n]) for n in range(18) if found.captions[n].tolist() == words]
        assert any(np.array_equal(found.look(video, 7), sample["frames"]) for video in about)


def test_faults_of_the_data_are_named(planned: Callable[..., Plan], tmp_path: Path) -> None:
    prefix = write_videos(tmp_path, VOCAB)
    model = planned(*MODELS["one"]).model
    other = planned(*MODELS["one"], "model.features=11").model
    with pytest.raises(DataError, match=r"have 10 features, but model.features=11; set model.features=10"):
        VideoSamples(prefix, Split(4, 1), other)
    short = planned(*MODELS["one"], "model.decoder_sequence_length=1").model
    with pytest.raises(DataError, match=r"none of 18 captions fits model.decoder_sequence_length=1; the longest needs"):
        VideoSamples(prefix, Split(4, 1), short)
    np.save(f"{prefix}-train.lengths.npy", np.full(12, 3))
    with pytest.raises(DataError, match=r"lengths.npy: adds up to 36 frames, but there are"):
        VideoSamples(prefix, Split(4, 1), model)
    Path(f"{prefix}-valid.frames.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"valid.frames.npy: cannot be read"):
        VideoSamples(prefix, Split(4, 1, name="valid"), model)


def test_a_search_leaves_out_what_lstms_cannot_do() -> None:
    experiment = compose(["model=s2vt-tiny", "parallel.partition=null"])
    allowed = runnable(experiment.engine, experiment.train, experiment.model)
    assert Schedule.zb_h1 not in allowed.schedule
    assert Recompute.selective not in allowed.recompute


def test_a_profile_times_every_kind_of_block(planned: Callable[..., Plan]) -> None:
    plan = planned(*MODELS["two"])
    parts = Parts(plan, plan.model, TensorGroup(), 2, torch.device("cpu"))
    assert parts.kept_bytes().keys() == {kind for kind, _ in plan.model.all_kinds()}
    parts._pass()
