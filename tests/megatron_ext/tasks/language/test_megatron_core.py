"""Our BERT and T5 learn what megatron-core's own models learn: losses and weights of ten steps of Adam, under tensor,
data and uneven pipeline parallelism of ours, from the same weights.

make test-megatron
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from conf.compose import compose
from megatron_ext.checkpoints.header import part_name
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.core import library
from megatron_ext.families.bert.task import BertTask
from megatron_ext.families.t5.task import T5Task
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language import language_task
from tests.megatron_ext.engine.test_layouts_agree import Layout
from tests.support.megatron_ext.engine_run import make_run
from tests.support.megatron_ext.masked import MaskedLoss, masked_samples
from tests.support.megatron_ext.textbook import trained

pytest.importorskip("megatron", reason="megatron-core is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

MICRO = 2
MODELS = {
    "bert": ("model.family=bert",),
    "bert-without-pairs": ("model.family=bert", "model.bert_binary_head=false"),
    "t5": ("model.family=t5", "model.layers=2", "model.decoder_layers=3", "model.decoder_sequence_length=16"),
    "t5-wide-heads": (
        *("model.family=t5", "model.layers=3", "model.decoder_layers=2", "model.kv_channels=12"),
        *("model.ffn_hidden=48", "model.decoder_sequence_length=16"),
    ),
}
PARTITIONS = {"bert": "1-2", "bert-without-pairs": "3-0", "t5": "1-4", "t5-wide-heads": "4-1"}
TEN = ("train.iterations=10", "train.weight_decay=0.01", "train.adam_eps=1e-5")
"""Adam makes whole steps of rounding errors if it may: a bias of all keys has no gradient, for softmax drops it."""


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for task in (BertTask, T5Task):
        monkeypatch.setattr(task, "samples", masked_samples)
    # Weights ten times as large, so that it matters which GELU a layer has, and which tokens are seen.
    draw = language_task.draw
    monkeypatch.setattr(language_task, "draw", lambda *rest: draw(*rest[:6], 10.0 * rest[6], *rest[7:]))  # type: ignore[call-arg]


@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_have_megatrons_losses_and_weights(corpus: Path, tmp_path: Path, model: str) -> None:
    layout = Layout(2, 2, 2, PARTITIONS[model], MICRO)
    words = (f"parallel.{key}={value}" for key, value in layout._asdict().items())
    run = make_run(tmp_path / "run", corpus, *MODELS[model], *TEN, *words)
    assert run.go() == 0, run.stderr()
    one = make_run(tmp_path / "one", corpus, *MODELS[model], *TEN, "parallel=single")
    theirs = in_a_process(tmp_path, functools.partial(ten_steps, one.plan))
    np.testing.assert_allclose(run.losses(), theirs.pop("losses").numpy(), rtol=0, atol=1e-5)
    found = run.weights()
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("model", ["bert-tiny", "bert-base", "t5-tiny", "t5-base"])
def test_a_model_has_as_many_weights_as_megatrons(tmp_path: Path, model: str) -> None:
    """Megatron pads the vocabulary, so here it needs no padding."""
    sizes = compose([f"model={model}", "model.vocab_size=1280", "parallel.partition=null"]).model.sized(1)
    assert in_a_process(tmp_path, functools.partial(count, sizes))["count"].item() == parameter_count(sizes)


def in_a_process(folder: Path, work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `work` returns in a process of its own, where CUDA is pretended and Megatron's global state stays."""
    library.preload()
    process = multiprocessing.get_context("fork").Process(target=_work, args=(folder, work))
    process.start()
    process.join(300.0)
    assert process.exitcode == 0
    found: dict[str, Tensor] = torch.load(folder / "found.pt")
    return found


def _work(folder: Path, work: Callable[[], dict[str, Tensor]]) -> None:
    from benchmarks.megatron_core import pretend_cuda

    pretend_cuda()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.save(work(), folder / "found.pt")


def count(sizes: ModelConfig) -> dict[str, Tensor]:
    return {"count": torch.tensor(sum(parameter.numel() for parameter in megatrons(sizes).parameters()))}


def ten_steps(plan: Plan) -> dict[str, Tensor]:
    """Losses, and weights under the names that our checkpoints have for them."""
    model = Theirs(plan.model)
    model.take(dict(stage_of(plan, 0, TensorGroup()).parameters_by_name()))
    batches = MaskedLoss(plan, MICRO)

    def loss(_: nn.Module, number: Tensor) -> Tensor:
        return torch.stack([model.loss(batch) for batch in batches.batches(number)]).mean()

    losses, state = trained(plan, loss, model)
    weights = {name[len("weights/") :]: tensor for name, tensor in state.items() if name.startswith("weights/")}
    return {"losses": torch.from_numpy(losses), **weights}


def megatrons(sizes: ModelConfig) -> nn.Module:
    """megatron-core's model of these sizes."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
    from megatron.core.transformer import TransformerConfig

    def config(layers: int) -> Any:
        return TransformerConfig(
            num_layers=layers,
            hidden_size=sizes.hidden,
            num_attention_heads=sizes.heads,
            num_query_groups=sizes.query_groups,
            kv_channels=sizes.head_width,
            ffn_hidden_size=sizes.inner,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_func=functools.partial(F.gelu, approximate="tanh"),
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            use_cpu_initialization=True,
        )

    if sizes.family == "bert":
        return BertModel(
            config(sizes.layers),
            num_tokentypes=2 if sizes.bert_binary_head else 0,
            transformer_layer_spec=bert_layer_local_spec,
            vocab_size=sizes.vocab_size,
            max_sequence_length=sizes.sequence_length,
            add_binary_head=sizes.bert_binary_head,
            share_embeddings_and_output_weights=True,
        )
    return T5Model(
        config(sizes.stacks()[1].layers),
        config(sizes.layers),
        encoder_model_with_local_spec(),
        decoder_model_with_local_spec(),
        sizes.vocab_size,
        sizes.positions,
        share_embeddings_and_output_weights=True,
    )


class Theirs(nn.Module):
    """megatron-core's model with our names, and Megatron-LM's losses of it (its pretrain_bert.py, pretrain_t5.py)."""

    def __init__(self, sizes: ModelConfig) -> None:
        super().__init__()
        self.model = megatrons(sizes)
        self.sizes = sizes
        parameters = dict(self.model.named_parameters())
        self.pairs = [(self.our_name(name), parameter) for name, parameter in parameters.items()]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["loss_mask"].float()
        if self.sizes.family == "bert":
            types = batch["types"] if self.sizes.bert_binary_head else None
            losses, pairs = self.model(batch["text"], batch["padding_mask"], types, lm_labels=batch["labels"])
            loss = (losses * mask).sum() / mask.sum()
            return loss if pairs is None else loss + F.cross_entropy(pairs.float(), batch["is_random"], ignore_index=-1)
        from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset

        masks = T5MaskedWordPieceDataset.config_attention_mask(
            batch["text_enc"], batch["text_dec"], batch["enc_mask"], batch["dec_mask"], use_local=True
        )
        losses = self.model(batch["text_enc"], batch["text_dec"], *masks, lm_labels=batch["labels"])
        return (losses * mask).sum() / mask.sum()

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        """Of our whole model, each of its weights once."""
        assert {name for name, _ in self.pairs} == set(weights)
        for name, parameter in self.pairs:
            parameter.copy_(self.by_head(name, weights[name], back=False))

    def state(self, values: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        """What there is of each weight, under the name that our checkpoints have for it."""
        found = {}
        for name, parameter in self.pairs:
            layer = name.split(".")[:2] if name.split(".")[1].isdigit() else name.split(".")[:1]
            inner = name[len(".".join(layer)) + 1 :]
            found[f"{part_name('.'.join(layer))}.{inner}"] = self.by_head(name, values(parameter), back=True)
        return found

    def by_head(self, name: str, tensor: Tensor, back: bool) -> Tensor:
        """From [queries, keys, values] to Megatron's order, in which those of a group of heads follow each other."""
        if not (".qkv." in name or ".cross_kv." in name):
            return tensor
        groups, width, rest = self.sizes.query_groups, self.sizes.head_width, tensor.shape[1:]
        each = [self.sizes.heads // groups, 1, 1] if ".qkv." in name else [1, 1]
        if back:
            parts = tensor.view(groups, sum(each), width, *rest).split(each, 1)
            return torch.cat([part.reshape(-1, *rest) for part in parts])
        parts = tensor.split([groups * heads * width for heads in each])
        own = [part.view(groups, heads, width, *rest) for part, heads in zip(parts, each, strict=True)]
        return torch.cat(own, 1).reshape(tensor.shape)

    def our_name(self, theirs: str) -> str:
        for begin, ours in NAMES.items():
            theirs = theirs.replace(begin, ours)
        if self.sizes.family == "bert":
            return theirs.replace("encoder.layers.", "layers.").replace("encoder.final_layernorm.", "head.norm.")
        theirs = theirs.replace("coder.layers.", "coder.").replace("decoder.final_layernorm.", "head.norm.")
        return theirs.replace("encoder.final_layernorm.", "encoder_norm.norm.")


NAMES = {
    "embedding.word_embeddings.weight": "embedding.word",
    "embedding.position_embeddings.weight": "embedding.position",
    "embedding.tokentype_embeddings.weight": "embedding.types",
    "position_embeddings.weight": "embedding.position",
    "lm_head.output_layer.bias": "head.bias",
    "output_layer.bias": "head.bias",
    "lm_head.dense.": "head.dense.",
    "lm_head.layer_norm.": "head.dense_norm.",
    "pooler.dense.": "head.pooler.",
    "binary_head.": "head.binary.",
    "pre_cross_attn_layernorm.": "cross_norm.",
    "cross_attention.linear_q.": "cross_query.",
    "cross_attention.linear_kv.": "cross_kv.",
    "cross_attention.linear_proj.": "cross_out.",
    "input_layernorm.": "attention_norm.",
    "self_attention.linear_qkv.": "qkv.",
    "self_attention.linear_proj.": "attention_out.",
    "pre_mlp_layernorm.": "mlp_norm.",
    "mlp.linear_fc1.": "mlp_in.",
    "mlp.linear_fc2.": "mlp_out.",
}
