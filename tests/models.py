"""A random Llama of two layers, in the sizes that tests ask for; the same arguments give the same weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


def random_llama(*, seed: int, attention: str = "sdpa", head_std: float | None = None, **sizes: Any) -> PreTrainedModel:
    """Makes the model.

    Args:
        seed: Of the weights; the global generator is left as it was.
        attention: Attention implementation, by its name in ``transformers``.
        head_std: Standard deviation of the output embedding; default: as of all weights.
        sizes: Of the configuration, ``vocab_size`` and so on.
    """
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **sizes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
        if head_std is not None:
            torch.nn.init.normal_(model.lm_head.weight, std=head_std)
    return model.eval()
