from __future__ import annotations

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, MistralConfig, Qwen2Config, Qwen3Config

from langgraph_art.protocol import LoraConfig
from langgraph_art_server.training.attention import TREE_ATTENTION
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.tree import TreeCall, build_tree

from .conftest import random_weights, tiny_llama
from .tasks import LORA

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_untrained_adapter_is_the_seed_s_and_changes_nothing(model: PolicyModel) -> None:
    pack = build_tree([TreeCall([1, 2, 3], [4], [-1.0], 1.0, 1.0)])
    before = model.hidden(pack)
    model.set_adapter(LORA, None)
    first = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
    assert torch.equal(model.hidden(pack), before)
    model.set_adapter(LoraConfig(rank=3, alpha=6, seed=6), None)
    assert any(not torch.equal(first[name], parameter) for name, parameter in model.parameters.items())
    model.set_adapter(LORA, None)
    assert all(torch.equal(first[name], parameter) for name, parameter in model.parameters.items())


def test_policies_take_turns_on_one_base(model: PolicyModel) -> None:
    """Different ranks and scales, back and forth: each computes as it did alone, and gradients do not leak."""
    pack = build_tree([TreeCall([1, 2, 3], [4], [-1.0], 1.0, 1.0)])
    other = LoraConfig(rank=5, alpha=20)
    model.set_adapter(LORA, None)
    weights = random_weights(model)
    model.set_adapter(LORA, weights)
    alone = model.hidden(pack)
    alone.sum().backward()
    model.set_adapter(other, None)
    model.set_adapter(other, random_weights(model, 1))
    assert not torch.allclose(model.hidden(pack), alone)
    model.set_adapter(LORA, weights)
    assert torch.equal(model.hidden(pack), alone)
    assert all(parameter.grad is None for parameter in model.parameters.values())
    assert sum(parameter.numel() for parameter in model.base.parameters() if parameter.requires_grad) == sum(
        parameter.numel() for parameter in model.parameters.values()
    )


def test_lora_as_one_node_equals_peft(model: PolicyModel) -> None:
    model.set_adapter(LORA, None)
    weights = random_weights(model)
    model.set_adapter(LORA, weights)
    plain = peft.get_peft_model(tiny_llama(attention="sdpa"), model.adapter_config(LORA))
    peft.set_peft_model_state_dict(plain, weights)
    ids = torch.tensor([[1, 5, 9, 3]])
    expected = plain.get_base_model().get_decoder()(ids).last_hidden_state[0]
    actual = model.hidden(build_tree([TreeCall(ids[0].tolist(), [1], [-1.0], 1.0, 1.0)]))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_weights_of_another_adapter_are_refused(model: PolicyModel) -> None:
    model.set_adapter(LORA, None)
    weights = random_weights(model)
    with pytest.raises(
        ValueError, match=r"does not fit the base model: .* has shape \(3, 40\), but .* needs \(4, 40\)"
    ):
        model.set_adapter(LoraConfig(rank=4, alpha=6), weights)
    weights.pop(min(weights))
    with pytest.raises(ValueError, match="has shape None"):
        model.set_adapter(LORA, weights)


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig])
def test_supported_families(config: type) -> None:
    options = {"sliding_window": None} if config is MistralConfig else {}
    # Two configurations: a model takes its attention from the object it was made with.
    base = AutoModelForCausalLM.from_config(config(**SHAPE, **options), attn_implementation=TREE_ATTENTION)
    plain = AutoModelForCausalLM.from_config(config(**SHAPE, **options), attn_implementation="sdpa")
    plain.load_state_dict(base.state_dict())
    hidden = PolicyModel(base).hidden(
        build_tree([TreeCall([1, 2, 3], [end, 5], [-1.0] * 2, 1.0, 1.0) for end in (6, 7)])
    )
    expected = plain.eval().get_decoder()(torch.tensor([[1, 2, 3, 7]])).last_hidden_state[0]
    torch.testing.assert_close(hidden[[0, 1, 2, 4]], expected, rtol=1e-4, atol=1e-5)


def test_sliding_window_is_refused() -> None:
    base = AutoModelForCausalLM.from_config(
        MistralConfig(**SHAPE, sliding_window=8), attn_implementation=TREE_ATTENTION
    )
    with pytest.raises(ValueError, match="'mistral' with sliding_window=8 cannot be trained exactly"):
        PolicyModel(base)


def test_recurrent_model_is_refused() -> None:
    base = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match="'mamba'"):
        PolicyModel(base)


def test_model_with_other_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens see more than the tokens before them"):
        PolicyModel(tiny_llama(attention="sdpa"))


def test_model_that_mixes_neighbours_is_refused() -> None:
    base = tiny_llama(attention=TREE_ATTENTION)

    class Mixing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x + x.roll(1, dims=1))

    base.model.layers[1].mlp = Mixing(base.model.layers[1].mlp)
    with pytest.raises(ValueError, match="tokens see more than the tokens before them"):
        PolicyModel(base)
