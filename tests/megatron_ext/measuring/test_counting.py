"""Memory is counted on the device meta, where nothing takes any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from megatron_ext.families.tasks import task_of
from megatron_ext.measuring import counting
from megatron_ext.measuring.counting import Repeated, counted
from megatron_ext.measuring.live_bytes import LiveBytes, attention_as_on_gpu
from megatron_ext.parallel import tensor_parallel
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.stage import Stage
from tests.megatron_ext.families.test_huggingface import plan_of
from tests.support.megatron_ext.tiny_transformers import whole, working

META = torch.device("meta")


def test_bytes_are_counted_while_they_are_there() -> None:
    x = torch.empty(1024, device=META)
    with LiveBytes() as live:
        live.begin(1)
        y = x * 2
        view = y[:3]
        del y
        live.begin(2)
        z = torch.empty(100, device=META)  # 400 bytes, of which an allocator makes 512
    assert (live.kept(), live.now, live.peaks) == ({1: 4096, 2: 512}, 4608, {1: 4096, 2: 4608})
    del view
    assert (live.kept(), live.now) == ({2: 512}, 512)
    del z


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_attention_keeps_no_scores(masked: bool) -> None:
    query = torch.empty(2, 4, 256, 64, device=META, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, 256, 256, device=META, dtype=torch.bool) if masked else None
    with attention_as_on_gpu(), LiveBytes() as live:
        out = F.scaled_dot_product_attention(query, query, query, mask, is_causal=not masked)
    heads, rows = 8, 256
    expected = 2 * out.numel() + 4 * heads * rows + (2 * 256 * 256 if masked else 0)
    assert expected <= live.now <= expected + 4096  # and states of random numbers
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@pytest.mark.parametrize("kind", ["gemma3_text", "mixtral"])
def test_a_model_is_counted_as_it_is(kind: str, tmp_path: Path) -> None:
    """Its parameters, and two samples keep twice what one does; what is computed again keeps what blocks give."""
    config = working(kind)
    found = counted(plan_of(config, tmp_path), [1, 2], 1)
    module, by_size = found["module"], found["bytes"]
    parameters = sum(block["parameters"] for block in module["blocks"]) - module["tied_parameters"]
    assert parameters == sum(one.numel() for one in whole(config).parameters())
    for one, two in zip(*by_size["kept"], strict=True):
        assert one <= two <= 2 * one
    hidden = 4 * 16 * config.hidden_size
    layers = slice(1, 1 + config.num_hidden_layers)
    assert all(hidden <= size <= hidden + 2048 for size in by_size["given"][0][layers])
    assert all(size > 4 * hidden for size in by_size["kept"][0][layers])


def test_the_gradients_of_tied_words_do_not_wait_for_each_other_where_stages_have_copies(tmp_path: Path) -> None:
    config = working("gemma3_text")
    assert config.tie_word_embeddings
    passing = counted(plan_of(config, tmp_path), [1], 1)["bytes"]["passing"][0]
    words = 4 * config.vocab_size * config.hidden_size
    assert words <= passing[0] < 1.5 * words


def test_what_the_host_works_out_once_is_not_counted(tmp_path: Path) -> None:
    """Positions and masks, by a copy of the model that is made when the first layer asks for them."""
    config = working("qwen2")
    config.vocab_size = 4096
    first, second, *_ = counted(plan_of(config, tmp_path), [1], 1)["bytes"]["passing_again"][0][1:]
    assert first == pytest.approx(second, rel=0.1)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe"])
def test_layers_that_stand_by_are_counted_as_if_they_had_computed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = working(kind)
    config.num_hidden_layers = 12
    if kind == "gemma3_text":
        config.layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    plan = plan_of(config, tmp_path)
    assert len(Repeated(task_of(plan).blocks).standing_by) >= 4
    few = counted(plan, [1, 2], 2)
    monkeypatch.setattr(counting, "COMPUTED", 12)
    assert Repeated(task_of(plan).blocks).standing_by == []
    assert counted(plan, [1, 2], 2) == few


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_sums_of_a_tensor_group_are_those_that_its_ranks_make(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(working(kind), tmp_path)
    by_name = counted(plan, [2], 2)["bytes"]
    expected = [sum(of) for way in ("forward", "backward") for of in list(zip(*by_name[way][0], strict=True))[3:]]
    made = [0.0, 0.0]

    def sum_up(tensor: torch.Tensor, *_: object) -> None:
        made[0] += 1
        made[1] += tensor.numel() * tensor.element_size()

    monkeypatch.setattr(tensor_parallel.dist, "all_reduce", sum_up)
    task, group, found = task_of(plan), TensorGroup(2), list[float]()
    (part,) = cut_between(task, [list(task.blocks)])
    stage = Stage(task, part, group, {})
    micro = task.example(2, torch.Generator().manual_seed(0))
    loss = task.loss(stage({name: micro.inputs[name] for name in stage.inputs}), micro, group)
    found += made
    made[:] = [0.0, 0.0]
    loss.backward()  # type: ignore[no-untyped-call]
    assert [*found, *made] == expected
    assert found[0] > 2 * len(stage.counted)


def test_a_head_holds_no_second_copy_of_a_tied_embedding(tmp_path: Path) -> None:
    """On a GPU it would stay on the host, and the head could not compute."""
    from megatron_ext.parallel.tensor_parallel import TensorGroup

    task = task_of(plan_of(working("gemma3_text"), tmp_path))
    head = task.blocks[-1].make(TensorGroup())
    _, model = head._outside  # type: ignore[misc]
    held = {id(one) for one in head.parameters()}
    outside = [one for name, one in model.named_parameters() if "layers." not in name and id(one) not in held]
    assert outside
    assert all(one.is_meta for one in outside)
