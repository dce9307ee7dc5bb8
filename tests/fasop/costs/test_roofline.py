"""Times of what was not measured: the starts of kernels count, so that no micro-batch is too small to be worth one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from conf.compose import compose, compose_unchecked
from conf.errors import ConfigError
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Gpu, Model, Precision
from fasop.costs.network.links import Link
from fasop.costs.profiles.files import with_profile
from fasop.costs.roofline import EMBEDDING, HEAD, START_S, Time, roofline, starts_s
from launch.commands.launching.resolve_auto import resolve_auto
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.measuring.passes import Parts
from megatron_ext.parallel.tensor_parallel import TensorGroup

WITHOUT_WORK = {"aten::detach", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::_unsafe_view"}
GPU = Gpu(name="A10", memory_gib=24, fp32_tflops=31, fp16_tflops=125, bf16_tflops=125, memory_gb_per_s=600)
AUTO = ("parallel.micro_batch_size=auto", "parallel.shares=auto")


class Kernels(TorchDispatchMode):
    """Counts what is not a mere view of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        self.count += not view and schema.name not in WITHOUT_WORK
        return func(*args, **(kwargs or {}))


def model(name: str) -> Model:
    return compose([f"model={name}", "parallel=single", "parallel.partition=null"]).model


def times(name: str, batch: int) -> dict[str, Time]:
    return {**roofline(GPU, model(name), Precision.fp32, 1, batch, Link(latency_s=0.0, s_per_byte=0.0))}


@pytest.mark.parametrize("name", ["tiny", "bert-tiny", "t5-tiny"])
def test_as_many_kernels_start_as_the_engine_calls(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path)
    one = compose([f"model={name}", "parallel=single", "parallel.partition=null", "model.hidden_dropout=0"])
    run.write_json(run.plan, make_plan(one, "test/run").as_json())
    plan = Plan.read(run.plan)
    parts = Parts(plan, plan.model, TensorGroup(), 1, torch.device("cpu"))
    by_kind = {stack.kind: starts_s(one.model, stack) / START_S for stack in one.model.sized(1).stacks()}
    by_kind |= {"embedding": EMBEDDING, "decoder_embedding": EMBEDDING, "head": HEAD, "encoder_norm": 1}
    entered: dict[str, Any] = {}
    for number, (kind, layers) in enumerate(parts._counts):
        with Kernels() as kernels:
            left = parts._through(number, entered)
        entered = {wire: tensor.detach().requires_grad_(tensor.requires_grad) for wire, tensor in left.items()}
        assert by_kind[kind] / 3 <= kernels.count / layers <= 3 * by_kind[kind], kind


@pytest.mark.slow
@given(
    st.sampled_from(["tiny", "xl", "llama-tiny", "t5-tiny", "gnmt-tiny", "awd-lm-tiny", "s2vt-tiny"]),
    st.integers(1, 16),
)
def test_a_larger_micro_batch_takes_longer_and_each_of_its_samples_less(name: str, batch: int) -> None:
    one, two = times(name, batch), times(name, 2 * batch)
    for kind in one:
        for way in ("forward", "backward"):
            assert getattr(one[kind], way) <= getattr(two[kind], way) < 2 * getattr(one[kind], way), (kind, way)


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (("experiment=gnmt_iidp_pairs", "model.vocab_size=470"), 8),
        (("experiment=gnmt_iidp_pairs", "model=tiny", "model.hidden=96", "data.prefix=x"), 2),
        (("experiment=gnmt_iidp_pairs", "model=t5-tiny", "model.hidden=32", "data.prefix=x"), 4),
    ],
    ids=["gnmt", "gpt", "t5"],
)
def test_auto_does_not_choose_micro_batches_of_one_where_nothing_was_measured(
    words: tuple[str, ...], least: int
) -> None:
    """With gnmt, runs on a CPU took 1,043 ms with micro-batches of 1, and 641 ms with 16."""
    chosen, said = resolve_auto(compose_unchecked([*words, *AUTO]))
    assert chosen.parallel.micro_batch_size >= least
    assert "of CPU fast has " in str(said)
    assert "measure them with 'tdpp profile', and add profile=NAME" in str(said)


def test_a_launch_takes_the_times_of_a_profile_by_its_name(tmp_path: Path) -> None:
    """`profile=NAME` as of other commands: a file for each kind of GPU."""
    text = Path("fasop/profiles/cpu.yaml").read_text(encoding="utf-8")
    for gpu in ("fast", "slow"):
        (tmp_path / f"mine_{gpu}.yaml").write_text(text, encoding="utf-8")
    words = ["experiment=gnmt_iidp_pairs", "model=tiny", "data.prefix=x"]
    cfg, added = with_profile(compose_unchecked(words), str(tmp_path / "mine.yaml"), words)
    assert resolve_auto(cfg, words)[0] == compose([*words, *added])
    assert compose([*words, *added]).cluster.gpus["slow"].profile == str(tmp_path / "mine_slow.yaml")
    with pytest.raises(ConfigError, match="no profile 'nope_fast'"):
        with_profile(compose_unchecked(words), "nope", words)


def test_links_that_were_measured_are_used_with_the_profile_unless_others_are_given(tmp_path: Path) -> None:
    text = Path("fasop/profiles/cpu.yaml").read_text(encoding="utf-8")
    pairs = {"fast": {"slow": {"gbit_per_s": 3.0}}, "slow": {"fast": {"gbit_per_s": 4.0, "latency_us": 7.0}}}
    for gpu in ("fast", "slow"):
        own = f"links: {pairs}\nbetween: {{p2p: {{latency_us: 12.5, gbit_per_s: 2.5}}}}\n"
        kept = [line for line in text.splitlines() if not line.startswith(("between", "links"))]
        assert "between:" not in "\n".join(kept)
        (tmp_path / f"mine_{gpu}.yaml").write_text("\n".join([*kept, own]), encoding="utf-8")
    words = ["experiment=gnmt_iidp_pairs", "model=tiny", "cluster.groups.slow.inter_gbit_per_s=1"]
    cfg, added = with_profile(compose_unchecked(words), str(tmp_path / "mine.yaml"), words)
    composed = compose([*words, *added])
    assert resolve_auto(cfg, words)[0] == composed
    groups = composed.cluster.groups
    assert (groups["fast"].inter_latency_us, groups["fast"].inter_gbit_per_s) == (12.5, 2.5)
    assert (groups["slow"].inter_latency_us, groups["slow"].inter_gbit_per_s) == (12.5, 1)
    assert composed.cluster.links == pairs
