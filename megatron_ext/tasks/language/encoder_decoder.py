"""What tasks of an encoder and a decoder have in common: the shapes of what they read and write."""

from __future__ import annotations

import torch

from megatron_ext.tasks.language.language_task import LanguageTask
from megatron_ext.tasks.task import Micro


class EncoderDecoderTask(LanguageTask):
    """Reads `text_enc`, `enc_mask` and `text_dec`, and is asked for `labels` where `loss_mask` is 1."""

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        model = self._model
        encoder, decoder = (micro_batch_size, model.sequence_length), (micro_batch_size, model.decoder_tokens)
        return self.micro(
            {
                "text_enc": torch.randint(model.vocab_size, encoder, generator=source),
                "text_dec": torch.randint(model.vocab_size, decoder, generator=source),
                "labels": torch.randint(model.vocab_size, decoder, generator=source),
                "loss_mask": torch.ones(decoder, dtype=torch.int64),
                "enc_mask": torch.ones(encoder, dtype=torch.int64),
                "number": torch.arange(micro_batch_size),
            }
        )
