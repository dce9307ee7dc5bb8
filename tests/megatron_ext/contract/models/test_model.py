"""What follows from a model's family and sizes: blocks, parameters, operations, and what is kept and crosses."""

from __future__ import annotations

import pytest

from conf.compose import compose
from megatron_ext.contract.models.counts import crossing, parameter_count
from megatron_ext.contract.models.model import ModelConfig


def model(name: str) -> ModelConfig:
    return compose([f"model={name}", "parallel.partition=null"]).model.sized(1)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("bert-base", 110_106_428),
        ("bert-large", 336_226_108),
        ("t5-base", 222_420_382),
        ("t5-large", 737_345_438),
        ("t5-3b", 2_852_425_530),
        ("transformer-base", 32768 * 512 + 6 * (12 * 512**2 + 9 * 512) + 6 * (16 * 512**2 + 11 * 512) + 2 * 1024),
        ("transformer-big", 32768 * 1024 + 6 * (12 * 1024**2 + 9 * 1024) + 6 * (16 * 1024**2 + 11 * 1024) + 4 * 1024),
        ("gnmt", 127_575_617),
        ("gnmt-16", 127_575_617 + 4 * 8 * (1024**2 + 1024) + 4 * (12 * 1024**2 + 8 * 1024)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_has_as_many_weights_as_published(name: str, weights: int) -> None:
    """The Transformer's and GNMT's follow from their layers: an LSTM has 4 (inputs + hidden + 2) x hidden weights.

    BERT: as Hugging Face's BertForPreTraining, which has a norm of the embeddings instead of a final one."""
    assert parameter_count(model(name)) == weights


def test_kinds_are_in_the_models_order_and_blocks_are_numbered_through() -> None:
    t5 = model("t5-tiny")
    assert t5.kinds() == (("encoder", 2), ("decoder", 2))
    assert [t5.block_name(number) for number in range(t5.counted)] == [
        "encoder.0",
        "encoder.1",
        "decoder.0",
        "decoder.1",
    ]
    assert model("bert-tiny").kinds() == (("layer", 4),) == model("tiny").kinds()


def test_a_decoders_stages_hand_on_what_it_attends_to() -> None:
    """Encoder sequence 128, decoder sequence 64, hidden 64: the last decoder layer leaves its own result alone."""
    assert [crossing(model("t5-tiny"), after) // 64 for after in range(5)] == [128, 128, 128, 128 + 64, 64]


def test_operations_are_two_for_each_weight_and_token_and_those_of_the_cores() -> None:
    t5 = model("t5-tiny")
    h, e, d = 64, 128, 64
    assert t5.traits.attention_operations(t5, "decoder") == 4 * h * (d * d + d * e)
    assert t5.traits.operations(t5, "encoder") == 2 * e * 12 * h * h + 4 * h * e * e
    assert t5.traits.operations(t5, "decoder") == 2 * h * h * (14 * d + 2 * e) + t5.traits.attention_operations(
        t5, "decoder"
    )
    assert t5.traits.operations(t5, "head") == 2 * d * h * 300
    assert t5.traits.operations(t5, "embedding") == t5.traits.operations(t5, "encoder_norm") == 0
    bert = model("bert-tiny")
    assert bert.traits.operations(bert, "head") == 2 * (128 * h * (h + 300) + h * h + 2 * h)


def test_a_models_identity_says_what_its_family_adds_and_nothing_else() -> None:
    assert "family" not in model("tiny").identity()
    assert model("bert-tiny").identity()["family"] == "bert"
    assert {"family": "t5", "decoder_layers": 2, "decoder_sequence_length": 64}.items() <= model(
        "t5-tiny"
    ).identity().items()
    even = compose(["model=t5-tiny", "model.decoder_layers=null"]).model.sized(1)
    assert even.identity() == model("t5-tiny").identity()
