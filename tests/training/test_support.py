"""Which models are refused by their configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from langgraph_art_server.app import create_app
from langgraph_art_server.config import ServerSettings
from langgraph_art_server.models import ModelNotFound
from langgraph_art_server.training.support import unsupported


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        MistralConfig(sliding_window=4096),
        MistralConfig(sliding_window=None),
        Qwen2Config(),
        Qwen2Config(use_sliding_window=True, max_window_layers=4),
        Qwen3Config(),
        GemmaConfig(),
        Gemma3TextConfig(),
        SmolLM3Config(),
        GraniteConfig(logits_scaling=1.0),
    ],
    ids=lambda config: config.model_type,
)
def test_supported(config: Any) -> None:
    assert unsupported(config.to_dict()) is None


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma2", "soft-capped attention"),
        ("granite", "scaled logits"),
        ("cohere", "scaled logits"),
        ("mixtral", "a mixture of experts"),
        ("qwen3_moe", "a mixture of experts"),
        ("deepseek_v3", "latent attention"),
        ("gpt_oss", "a mixture of experts"),
        ("qwen3_next", "recurrent layers"),
        ("mamba", "recurrent layers"),
        ("falcon_mamba", "recurrent layers"),
        ("jamba", "recurrent layers"),
        ("recurrent_gemma", "recurrent layers"),
        ("nemotron_h", "recurrent layers"),
        ("rwkv", "recurrent layers"),
        ("lfm2", "recurrent layers"),
        ("gemma3", "image input"),
        ("qwen2_vl", "image input"),
        ("t5", "an encoder"),
        ("cohere2", "sliding-window attention"),
        ("bloom", "position-biased attention"),
        ("mpt", "position-biased attention"),
    ],
)
def test_refused_by_name(model_type: str, reason: str) -> None:
    options = {"logits_scaling": 8.0} if model_type == "granite" else {}
    problem = unsupported(AutoConfig.for_model(model_type, **options).to_dict())
    assert problem is not None
    assert reason in problem
    assert repr(model_type) in problem


def test_server_does_not_start_with_a_model_that_it_cannot_train(tmp_path: Path) -> None:
    """Known before the engine is started, let alone anything rolled out."""
    Gemma2Config().save_pretrained(tmp_path)
    settings = ServerSettings(model=str(tmp_path), data_dir=tmp_path / "data", device="cpu")
    with pytest.raises(ModelNotFound, match=r"'gemma2' with soft-capped attention .* cannot be trained exactly"):
        create_app(settings)


def test_weights_packed_by_others_are_refused() -> None:
    llama = LlamaConfig().to_dict()
    assert unsupported(llama | {"quantization_config": {"quant_method": "bitsandbytes"}}) is None
    problem = unsupported(llama | {"quantization_config": {"quant_method": "gptq"}})
    assert problem == "a model of type 'llama' with weights packed by gptq cannot be trained exactly"
