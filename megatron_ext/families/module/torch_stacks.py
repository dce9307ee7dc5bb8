"""torch's stacks of Transformer layers, layer by layer.

Their own forward passes look at what is in a tensor, to choose a faster way for inference; torch.fx cannot follow that.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

from torch import nn


def _encoder(
    stack: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: Optional[bool] = None,
) -> Any:
    for layer in stack.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return src if stack.norm is None else stack.norm(src)


def _decoder(
    stack: nn.TransformerDecoder,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: Optional[bool] = None,
    memory_is_causal: bool = False,
) -> Any:
    for layer in stack.layers:
        tgt = layer(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=bool(tgt_is_causal),
            memory_is_causal=memory_is_causal,
        )
    return tgt if stack.norm is None else stack.norm(tgt)


def _transformer(
    model: nn.Transformer,
    src: Any,
    tgt: Any,
    src_mask: Any = None,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    src_key_padding_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    src_is_causal: Optional[bool] = None,
    tgt_is_causal: Optional[bool] = None,
    memory_is_causal: bool = False,
) -> Any:
    memory = model.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
    return model.decoder(
        tgt,
        memory,
        tgt_mask,
        memory_mask,
        tgt_key_padding_mask,
        memory_key_padding_mask,
        tgt_is_causal,
        memory_is_causal,
    )


FORWARD: Dict[type, Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
"""By class: its forward pass."""
