"""Tiny models that the trainer's tests compute with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from langgraph_art_server.training.attention import TREE_ATTENTION
from langgraph_art_server.training.model import PolicyModel

VOCABULARY = 31

torch.set_num_threads(1)  # tensors this small gain nothing from more


def tiny_llama(*, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random two-layer Llama; always the same weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    return model.to(dtype).eval()


class _ExactNorm(modeling_llama.LlamaRMSNorm):
    """RMSNorm without the cast to float32 inside, which would hide errors below 1e-8."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a Llama compute in float64 throughout."""
    for module in model.modules():
        if type(module) is modeling_llama.LlamaRMSNorm:
            module.__class__ = _ExactNorm
    return model.double()


def random_weights(model: PolicyModel, seed: int = 0) -> dict[str, Tensor]:
    """Adapter weights for an attached adapter, with a B that is not zero, so that A has a gradient too."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2
        for name, parameter in model.parameters.items()
    }


@pytest.fixture
def model() -> PolicyModel:
    """A tiny model in float32."""
    return PolicyModel(tiny_llama(attention=TREE_ATTENTION))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model on disk."""
    directory = tmp_path_factory.mktemp("model")
    tiny_llama(attention="sdpa").save_pretrained(directory)
    return directory
