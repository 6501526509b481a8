"""Tiny models that the trainer's tests compute with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from langgraph_art_server.training.attention import TREE_ATTENTION
from langgraph_art_server.training.model import PolicyModel

from ..models import random_llama

VOCABULARY = 31

torch.set_num_threads(1)  # tensors this small gain nothing from more


def tiny_llama(*, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random two-layer Llama; always the same weights."""
    model = random_llama(
        seed=7,
        attention=attention,
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        initializer_range=0.3,
    )
    return model.to(dtype)


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model compute in float64 throughout: its norms cast to float32 inside, which hides errors below 1e-8."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_exact_norm, module)
    return model.double()


def _exact_norm(module: Any, x: Tensor) -> Tensor:
    gemma = type(module).__name__.startswith("Gemma")
    eps = module.eps if gemma else module.variance_epsilon
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + module.weight if gemma else module.weight)


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
