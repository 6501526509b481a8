"""Which base models can be trained exactly, told from their ``config.json`` alone: no weights, no torch.

Invariant: a model that this page refuses is refused by name before anything is started. One that it lets pass is tried
once more on its real layers when the trainer loads it, see :class:`PolicyModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPTIONS = {
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "moe_num_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "attention_chunk_size": "chunked attention",
    "use_bidirectional_attention": "bidirectional attention",
    "alibi": "position-biased attention",
    "vision_config": "image input",
    "audio_config": "audio input",
    "is_encoder_decoder": "an encoder",
}
"""Options under which attention, logits or LoRA as computed here would be wrong or leave parts of the model out."""

_NEUTRAL = {"logit_scale": 1.0, "logits_scaling": 1.0}
"""Values that change nothing."""

_BIASED = {"bloom", "mpt"}
"""Model types that always add a bias by distance to the scores."""

_RECURRENT = ("mamba", "ssm_", "linear_", "conv_", "lru_", "rwkv", "recurrent", "state_size", "retention")
"""Beginnings of options and model types that only recurrent, convolutional or hybrid models have."""

_WINDOWED = {"gemma3_text", "mistral", "ministral", "qwen2", "qwen3"}
"""Model types whose sliding windows are tested to be exact."""


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Says why a base model cannot be trained exactly.

    Args:
        config: Its ``config.json``.

    Returns:
        One sentence for people, or ``None`` if nothing speaks against it.
    """
    model_type = str(config.get("model_type"))
    problems = [
        f"{meaning} ({name})"
        for name, meaning in _OPTIONS.items()
        if config.get(name) and config[name] != _NEUTRAL.get(name)
    ]
    if model_type in _BIASED:
        problems.append("position-biased attention")
    names = [model_type, *(name for name in config if config[name])]
    problems += [f"recurrent layers ({name})" for name in names if name.startswith(_RECURRENT)]
    layer_types = set(config.get("layer_types") or [])
    if others := layer_types - {"full_attention", "sliding_attention"}:
        problems.append(f"layers of type {', '.join(sorted(others))}")
    if model_type not in _WINDOWED and _window(config, layer_types):
        problems.append(f"sliding-window attention (sliding_window={config['sliding_window']})")
    packing = config.get("quantization_config") or {}
    if packing and packing.get("quant_method") != "bitsandbytes":
        problems.append(f"weights packed by {packing.get('quant_method')}")
    if not problems:
        return None
    return f"a model of type {model_type!r} with {', '.join(problems)} cannot be trained exactly"


def _window(config: Mapping[str, Any], layer_types: set[str]) -> bool:
    if layer_types:
        return "sliding_attention" in layer_types
    return bool(config.get("sliding_window") and config.get("use_sliding_window", True))
