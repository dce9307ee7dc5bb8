"""A user's own module trains under stages and replicas as it does in one plain process."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron_ext.blocks import plan_of
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from megatron_ext.families.tasks import task_of
from reports.readers.record import read, stage_contents
from tests.support import cases
from tests.support.megatron_ext import user_models
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.users_files import MODELS, imported, users_file

RANDOM = ("convnet", "Residual", "Translator", "Recurrent")
"""Those with dropout, which one plain process without micro-batches' seeds draws otherwise."""
LAYOUTS = {
    "pp2": ("parallel.pipeline=2",),
    "pp3-zb": ("parallel.pipeline=3", "parallel.schedule=zb_h1"),
    "pp2-dp2": ("parallel.pipeline=2", "parallel.data=2"),
    "pp3-recompute": ("parallel.pipeline=3", "parallel.recompute=full"),
    "pp2-dp2-gpipe": ("parallel.pipeline=2", "parallel.data=2", "parallel.schedule=gpipe"),
    "pp2-interleaved": ("parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=interleaved"),
    "streams": ("parallel.streams=2", "parallel.recompute=full"),
}
DROPPING = ("pp3-recompute", "pp2-dp2-gpipe", "pp2-interleaved", "streams")


def module_run(folder: Path, name: str, *overrides: str, code: str = "", capture: bool | None = None) -> EngineRun:
    """A run of one of `user_models`, with a file that imports it as a user's file would define it."""
    file = users_file(folder.parent, name, code)
    _, captured = MODELS.get(name, ("image", False))
    words = [
        *(
            "model=module",
            f"model.code={file}:{name}",
            f"model.capture={str(captured if capture is None else capture).lower()}",
        ),
        *("train.iterations=4", "train.log_interval=1", "train.lr=1e-2", "train.min_lr=1e-5"),
        *("train.lr_warmup_iterations=1", "train.comm_timeout_s=120", "train.clip_grad=0.5", "train.seed=7"),
        *("parallel=single", "parallel.global_batch_size=8", "parallel.micro_batch_size=2"),
    ]
    return make_run(folder, Path("none"), *words, *overrides, base=())


def plain(plan: Plan, name: str, dropout: bool) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Losses and final weights of one process, as a user would write it without tdpp."""
    torch.manual_seed(plan.train.seed)
    model = getattr(user_models, name)()
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    train = plan.train
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.requires_grad and p.dim() <= 1], "weight_decay": 0.0},
        ],
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )
    data = user_models.Made(MODELS[name][0], train.seed)
    order = [
        int(place)
        for epoch in range(3)
        for place in torch.randperm(len(data), generator=torch.Generator().manual_seed(train.seed + epoch))
    ]
    losses = []
    for step in range(train.iterations):
        optimizer.zero_grad()
        total = 0.0
        for first in range(step * 8, step * 8 + 8, plan.micro_batch_size):
            batch = [data[place] for place in order[first : first + plan.micro_batch_size]]
            inputs, targets = torch.utils.data.default_collate(batch)
            if isinstance(inputs, dict):
                outputs = model(**inputs)
            else:
                outputs = model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs)
            loss = user_models.loss(outputs, targets) / (8 / plan.micro_batch_size)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        losses.append(total)
    return np.array(losses), dict(model.state_dict())


def users_names(run: EngineRun) -> dict[str, torch.Tensor]:
    """What the newest checkpoint holds, by the names that it has in the user's module."""
    return {
        name.split(".module.", 1)[1]: tensor
        for name, tensor in run.state().items()
        if name.startswith(("weights/", "state/"))
    }


@pytest.mark.parametrize(
    ("name", "layout"),
    cases.covering(
        product([name for name in MODELS if name not in RANDOM], ("pp2", "pp3-zb", "pp2-dp2")),
        set,
        always=[("Seq2Seq", "pp3-zb"), ("SharedEmbedding", "pp2-dp2")],
    ),
)
def test_a_module_trains_on_stages_as_in_one_plain_process(tmp_path: Path, name: str, layout: str) -> None:
    run = module_run(tmp_path / "run", name, *LAYOUTS[layout])
    assert run.go() == 0, run.stderr()
    losses, weights = plain(run.plan, name, dropout=True)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-5)
    found = users_names(run)
    assert found.keys() <= weights.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(
            tensor, weights[key], rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert {weights[key].data_ptr() for key in found} == {tensor.data_ptr() for tensor in weights.values()}


def test_a_sample_is_read_whatever_it_is_made_of(tmp_path: Path) -> None:
    """By its own names, in the order of the seed; also one that requires a gradient, and Python's numbers."""
    code = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 1))

def loss(outputs, targets):
    return outputs.sum() * targets["scale"].sum()

def data(split, seed):
    names = ["scale"] if split == "train" else ["scale", "other"]
    return [
        (torch.full((3,), float(n), requires_grad=n % 2 == 1), {names[-(n == 2)]: n + 0.5, "n": n}) for n in range(6)
    ]
"""
    file = users_file(tmp_path, "Net", code)
    task = task_of(plan_of(f"{file}:Net", False, 2))
    batch = task.samples("train", 12).batch(np.arange(12).reshape(2, 6))
    numbers = batch["targets.n"]
    assert [sorted(epoch) for epoch in numbers.tolist()] == [[*range(6)]] * 2
    assert numbers[0].tolist() != numbers[1].tolist()
    assert (batch["inputs"] == numbers[..., None]).all()
    assert (batch["targets.scale"] == numbers + 0.5).all()
    with pytest.raises(EngineError, match=r"targets\.(other|scale) of sample \d is .* it has none"):
        task.samples("valid", 6).batch(np.arange(6))


def test_each_rank_makes_the_task_once(tmp_path: Path) -> None:
    """A user's code may take its time, and what it writes should be written once for each rank."""
    code = imported("Residual") + f"\n\nopen({str(tmp_path / 'made')!r}, 'a').write('made\\n')\n"
    run = module_run(tmp_path / "run", "Residual", "parallel.pipeline=2", "train.iterations=2", code=code)
    (tmp_path / "made").unlink()  # by who counted the blocks for the plan
    assert run.go() == 0, run.stderr()
    assert (tmp_path / "made").read_text() == "made\n" * 2


@pytest.mark.parametrize(("name", "layout"), cases.covering(product(RANDOM, DROPPING), set))
def test_dropout_does_not_depend_on_the_layout(tmp_path: Path, name: str, layout: str) -> None:
    runs = [
        module_run(tmp_path / "one", name, "parallel.pipeline=1"),
        module_run(tmp_path / "other", name, *LAYOUTS[layout]),
    ]
    for run in runs:
        assert run.go() == 0, run.stderr()
        np.testing.assert_allclose(run.losses(), runs[0].losses(), rtol=1e-5)
        for key, tensor in run.weights().items():
            if key.endswith("in_proj_bias"):  # of keys it has no gradient but rounding errors, which Adam scales up
                continue
            torch.testing.assert_close(tensor, runs[0].weights()[key], rtol=1e-5, atol=1e-5)
    assert abs(runs[0].losses() - plain(runs[0].plan, name, dropout=False)[0]).max() > 1e-3, "dropout drops nothing"


def test_micro_batches_of_a_module_weigh_as_its_file_says(tmp_path: Path) -> None:
    code = """
from torch.nn import functional as F
from tests.support.megatron_ext.user_models import Made, SharedEmbedding

def loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")

def weight(targets):
    return (targets > 0).sum()

def metrics(outputs, targets):
    return {"right": ((outputs.argmax(-1) == targets) & (targets > 0)).sum().item()}

def data(split, seed):
    samples = Made("tokens", seed)
    samples.tokens[::3, 1, 2:] = 0
    samples.tokens[::5, 1] = 0
    return samples
"""
    layouts = [(), ("parallel.pipeline=2", "parallel.data=2", "parallel.partition=2-3")]
    one, two = (
        module_run(tmp_path / str(number), "SharedEmbedding", *layout, code=code, capture=True)
        for number, layout in enumerate(layouts)
    )
    for run in (one, two):
        assert run.go() == 0, run.stderr()
    np.testing.assert_allclose(two.losses(), one.losses(), rtol=1e-5)
    found: dict[str, Any] = {}
    exec(code, found)
    torch.manual_seed(one.plan.train.seed)
    model, samples = user_models.SharedEmbedding(), found["data"]("train", one.plan.train.seed)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(one.plan.train.seed))
    tokens, targets = (torch.stack([samples[int(place)][part] for place in order[:8]]) for part in range(2))
    outputs = model(tokens)
    expected = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0).item()
    right = (outputs.argmax(-1) == targets)[targets > 0].float().mean().item()
    for run in (one, two):
        assert run.losses()[0] == pytest.approx(expected, rel=1e-5)
        assert run.metrics()[0]["right"] == pytest.approx(right, rel=1e-5)


def test_pages_name_blocks_that_only_the_ranks_could_find_out(tmp_path: Path) -> None:
    """As in a container, where the launch cannot look at the module."""
    run = module_run(tmp_path / "run", "convnet", "parallel.pipeline=2", "parallel.partition=2-7")
    run.run.write_json(run.run.plan, {**run.plan.as_json(), "blocks": None})
    assert run.go() == 0, run.stderr()
    found = read(run.run)
    assert found.plan.blocks == [block.name for block in task_of(run.plan).blocks]
    assert [stage_contents(found.plan, stage) for stage in range(2)] == ["0-1", "2-8"]
    for content, said in (
        ({"blocks": ["a"]}, r"blocks\.json: .*9 names"),
        ({}, None),
        ([], r"blocks\.json is not a JSON object"),
        ({"blocks": 3}, r"blocks\.json: .*blocks=3"),
    ):
        run.run.write_json(run.run.blocks, content)
        damaged = read(run.run)
        assert damaged.plan.blocks is None
        if said is not None:
            assert any(re.search(said, note) for note in damaged.notes), damaged.notes
