"""Times come from a profile where it has them, are marked where it has not, and follow the formulas of the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from conf.schema.experiment import EngineKind, Precision
from fasop.costs.layers import (
    Basis,
    LayerTimes,
    gradients_summed,
    layer_times,
    measured_tensor_sizes,
    weights_handed_out,
    why_not_measured,
)
from fasop.costs.memory.stages import stage_memory
from fasop.costs.network.links import Link, between, within
from fasop.costs.profiles.doubts import doubts
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts, Shape, optimizer_s_per_parameter
from fasop.costs.profiles.profile_text import profile_text
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.tables.plans import options
from megatron_ext.contract.parallel_config import RECOMPUTES
from tests.support.fasop.plans import MEGATRON, kinds, mixed, training

A100, A10 = kinds(mixed())
MEGATRON_CORE = ("engine=megatron_core",)


def profile(**layer_ms: float) -> LayerProfile:
    """Of XL, with these forward times of a layer, by micro-batch `m<size>`; backward takes twice as long."""
    small = Cost(forward=0.5, backward=0.5)
    costs = [
        ModelCosts(
            model="xl",
            tensor=1,
            micro_batch_size=int(name[1:]),
            precision=Precision.fp16,
            embedding=small,
            layer=Cost(forward=ms, backward=2 * ms),
            head=small,
        )
        for name, ms in layer_ms.items()
    ]
    return LayerProfile(gpu="X", models={"xl": Shape.of(training().model)}, costs=costs)


def of_another_shape() -> LayerProfile:
    known = profile(m1=1.0)
    return replace(known, models={"xl": replace(known.models["xl"], heads=20)})


def times(profile: LayerProfile | None, *overrides: str, **sizes: object) -> LayerTimes:
    return layer_times(A10.gpu, profile, training("train.precision=fp16", *overrides, **sizes), within(A10.group))


@pytest.mark.parametrize(
    ("size", "ms", "basis"),
    [
        (1, 2.0, Basis.EXTRAPOLATED),
        (2, 2.0, Basis.MEASURED),
        (4, 3.5, Basis.INTERPOLATED),
        (8, 6.5, Basis.MEASURED),
        (16, 13.0, Basis.EXTRAPOLATED),
    ],
    ids=["below", "least", "between", "largest", "above"],
)
def test_a_micro_batch_that_was_not_measured_says_so(size: int, ms: float, basis: Basis) -> None:
    found = times(profile(m8=6.5, m2=2.0), micro_batch_size=size)
    assert (found.layer.forward, found.layer.backward) == (pytest.approx(ms / 1e3), pytest.approx(2 * ms / 1e3))
    assert found.basis is basis


def test_an_unknown_tensor_size_is_told_with_the_known_ones() -> None:
    with pytest.raises(SearchError, match=r"profile 'a10' of A10 has no costs .*tensor=2; it has tensor sizes 1;"):
        times(profile(m1=1.0), tensor=2)


@pytest.mark.parametrize("known", [None, of_another_shape()], ids=["no-profile", "another-shape"])
def test_a_gpu_without_costs_has_a_roofline_that_says_so(known: LayerProfile | None) -> None:
    found = times(known)
    measured = times(A10.profile)
    assert found.basis is Basis.NOT_MEASURED
    assert str(found.basis) == "not measured"
    for part in ("embedding", "layer", "head"):
        peak, real = getattr(found, part), getattr(measured, part)
        assert 0.01 * real.forward < peak.forward < real.forward
        assert 0.01 * real.backward < peak.backward < real.backward


def test_a_tensor_group_shares_the_roofline_and_pays_for_its_collectives() -> None:
    alone, four = times(None), times(None, tensor=4)
    whole = training("train.precision=fp16")
    message = whole.crossing[1]
    reduce = within(A10.group).all_reduce(4).takes(float(message))
    assert alone.layer.forward / 4 + 2 * reduce < four.layer.forward < alone.layer.forward / 2 + 2 * reduce


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_messages_in_8_bits_have_a_byte_for_each_number_and_a_scale_for_each_block(precision: str) -> None:
    words = (f"train.precision={precision}", "parallel.micro_batch_size=2")
    plain, compressed = training(*words), training(*words, "parallel.compress=int8")
    numbers = 2 * plain.model.sequence_length * plain.model.hidden
    assert {*plain.messages} == {*compressed.crossing} == {numbers * plain.width}
    assert {*compressed.messages} == {numbers + 4 * -(-numbers // 256)}
    assert {wire.numbers for wire in compressed.wires} == {*compressed.messages}
    assert stage_memory(compressed, 1.0) == stage_memory(plain, 1.0)
    assert compressed.parallel.configured().compress == "int8"
    assert "messages in int8" in options(compressed.parallel)
    assert "messages" not in options(plain.parallel)


def test_recomputation_adds_what_is_done_again() -> None:
    none, some, full = (times(A10.profile, f"parallel.recompute={what}") for what in RECOMPUTES)
    assert full.layer.backward == none.layer.backward + none.layer.forward
    assert none.layer.backward < some.layer.backward < none.layer.backward + 0.2 * none.layer.forward
    assert none.layer.forward == some.layer.forward == full.layer.forward


@given(st.integers(2, 64), st.floats(0, 1), st.floats(1e-12, 1), st.floats(1, 1e12))
def test_an_all_reduce_scatters_and_gathers(ranks: int, latency: float, rate: float, size: float) -> None:
    link = Link(latency_s=latency, s_per_byte=rate)
    parts = link.reduce_scatter(ranks).takes(size) + link.all_gather(ranks).takes(size)
    assert link.all_reduce(ranks).takes(size) == pytest.approx(parts)


def test_one_rank_has_nothing_to_sum() -> None:
    assert within(A10.group).all_reduce(1).takes(1e9) == 0


def test_latency_counts() -> None:
    slow = replace(A10.group, inter_latency_us=1e6)
    assert between(slow, 1).takes(0.0) == 1.0
    assert between(slow, 1).all_reduce(4).takes(0.0) == 6.0


def test_ranks_share_a_nodes_link() -> None:
    assert between(A10.group, 4).takes(5e9) - 20e-6 == pytest.approx(4 * 8 * 5e9 / 40e9)


@pytest.mark.parametrize(
    ("overrides", "sharded", "reduced", "handed"),
    [
        ((), False, 2 * 3 / 4 * 4, 0),
        ((), True, 3 / 4 * 4, 3 / 4 * 4),
        (("train.precision=bf16",), True, 3 / 4 * 4, 3 / 4 * 2),
        (("train.precision=bf16", "parallel.reduce_dtype=bf16"), True, 3 / 4 * 2, 3 / 4 * 2),
        (("parallel.reduce_dtype=bf16",), False, 2 * 3 / 4 * 2, 0),
        (MEGATRON, False, 2 * 3 / 4 * 2, 0),
        (MEGATRON, True, 3 / 4 * 2, 3 / 4 * 2),
        ((*MEGATRON, "engine.arguments=[--accumulate-allreduce-grads-in-fp32]"), False, 2 * 3 / 4 * 4, 0),
    ],
    ids=[
        *("fp32", "sharded", "bf16-sharded", "bf16-sums-sharded", "bf16-sums"),
        *("megatron-fp16", "megatron-fp16-sharded", "megatron-fp32-sums"),
    ],
)
def test_each_engine_sums_gradients_in_its_own_way(
    overrides: tuple[str, ...], sharded: bool, reduced: float, handed: float
) -> None:
    """Bytes per parameter that go over four replicas' links."""
    link = Link(latency_s=0.0, s_per_byte=1.0)
    one = training(*overrides, sharded_optimizer=sharded)
    assert gradients_summed(link, one).s_per_byte == pytest.approx(reduced)
    assert weights_handed_out(link, one).s_per_byte == pytest.approx(handed)


def test_the_optimizer_takes_what_was_measured_or_what_memory_allows() -> None:
    assert optimizer_s_per_parameter(A10.gpu, A10.profile, Precision.fp16) == 0.31e-9
    assert optimizer_s_per_parameter(A10.gpu, A10.profile, Precision.bf16) == 0.31e-9  # as the layers' times of fp16
    assert optimizer_s_per_parameter(A10.gpu, A10.profile, Precision.fp32) == pytest.approx(40 / 600e9)
    assert optimizer_s_per_parameter(A100.gpu, A100.profile, Precision.fp16) == pytest.approx(46 / 1555e9)


def test_times_in_16_bit_never_serve_a_run_in_fp32_and_the_user_is_told() -> None:
    found = times(A10.profile, "train.precision=fp32")
    assert found.basis is Basis.NOT_MEASURED
    assert found.layer.forward > times(None, "train.precision=fp16").layer.forward
    why = why_not_measured(A10.gpu, A10.profile, training("train.precision=fp32"))
    assert why == (
        "profile 'a10' of A10 has times of model=xl in fp16, not in train.precision=fp32: search train.precision=fp16, "
        "or measure fp32 with 'tdpp profile'"
    )
    assert why_not_measured(A10.gpu, A10.profile, training("train.precision=fp16")) is None


def test_of_a_model_whose_sizes_were_changed_it_is_said_which_were_measured() -> None:
    other = training("train.precision=fp16", "model.sequence_length=2048", "model.swiglu=true")
    assert why_not_measured(A10.gpu, A10.profile, other) == (
        "profile 'a10' of A10 has times of model=xl with model.sequence_length=1024, model.swiglu=the default, not of "
        "this one"
    )
    unknown = training("train.precision=fp16", "model.name=mine", "model.heads=8")
    assert str(why_not_measured(A10.gpu, A10.profile, unknown)).endswith("has no times of model=mine (of this shape)")


@pytest.mark.parametrize(
    ("of", "options", "engine", "basis"),
    [
        (EngineKind.megatron_core, {}, MEGATRON_CORE, Basis.MEASURED),
        (EngineKind.megatron_core, {}, (), Basis.OTHER_ENGINE),
        (EngineKind.megatron_core, {}, MEGATRON, Basis.MEASURED),
        (EngineKind.megatron_core, {"moe_z_loss_coeff": 0.1}, MEGATRON_CORE, Basis.OTHER_ENGINE),
        (EngineKind.tdpp, {}, (), Basis.MEASURED),
        (EngineKind.tdpp, {}, MEGATRON_CORE, Basis.OTHER_ENGINE),
        (None, {}, MEGATRON_CORE, Basis.MEASURED),
    ],
)
def test_times_of_another_engines_layers_are_marked(
    of: EngineKind | None, options: dict[str, float], engine: tuple[str, ...], basis: Basis
) -> None:
    """Megatron-LM's layers are Megatron-Core's; a profile without an engine serves for any."""
    measured = replace(A10.profile, engine=of, engine_options=options)
    found = times(measured, "train.precision=fp16", *engine)
    assert found.basis is basis
    assert found.layer == times(A10.profile, "train.precision=fp16").layer
    node = replace(A10, profile=measured)
    said = [one for one in doubts(training("train.precision=fp16", *engine), [node], {basis}) if "engine" in one]
    assert bool(said) is (basis is Basis.OTHER_ENGINE)


def test_this_machines_cpu_is_measured_and_searches_use_it() -> None:
    one = compose(["experiment=demo", "cluster.groups.local.gpus_per_node=4"])
    (cpu,) = kinds(one)
    assert measured_tensor_sizes(cpu.gpu, cpu.profile, Training.of(one)) == {1, 2}
    found = layer_times(cpu.gpu, cpu.profile, Training.of(one), within(cpu.group))
    assert found.basis is Basis.MEASURED


def test_the_other_16_bit_format_serves_where_the_gpu_is_as_fast_in_it_and_says_so() -> None:
    assert times(A10.profile, "train.precision=bf16").basis is Basis.OTHER_FORMAT
    slower = replace(A10.gpu, bf16_tflops=60)
    found = layer_times(slower, A10.profile, training("train.precision=bf16"), within(A10.group))
    assert found.basis is Basis.NOT_MEASURED


def test_a_profile_of_gpt2_has_no_times_of_a_llama_of_its_sizes(tmp_path: Path) -> None:
    """And a Llama's is found again as it was written, whatever its rotary embedding turns by."""
    llama = training("model.swiglu=true", "model.num_query_groups=4", "model.normalization=RMSNorm").model
    measured = profile(m1=1.0)
    assert measured.points(training().model, Precision.fp16)
    assert not measured.points(llama, Precision.fp16)
    own = replace(measured, source="a test", models={"xl": Shape.of(llama)})
    path = tmp_path / "own.yaml"
    path.write_text(profile_text(own, "of a test"))
    found = read_profile(str(path))
    assert found.models == own.models
    other = training(
        *("model.swiglu=true", "model.num_query_groups=4", "model.normalization=RMSNorm", "model.norm_epsilon=1e-6")
    ).model
    assert found.points(other, Precision.fp16)
