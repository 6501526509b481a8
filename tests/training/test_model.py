"""The base model and its adapter: values and gradients of trees, on models of each supported style."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Literal

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from langgraph_art.protocol import LoraConfig
from langgraph_art_server.training.attention import TREE_ATTENTION
from langgraph_art_server.training.lora import unpacked
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.tree import TreeCall, build_tree

from .conftest import exact, random_weights, tiny_llama
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


STYLES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama 3 rope": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2, windows in the upper layer": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "gemma": GemmaConfig(**SHAPE, head_dim=8),
    "gemma 3, windows in the lower layer": Gemma3TextConfig(
        **SHAPE, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "mistral, windows": MistralConfig(**SHAPE, sliding_window=6),
}


class Styled:
    """A random model twice, in float64: as the trainer computes it, and as transformers and PEFT do."""

    def __init__(self, config: PretrainedConfig) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            # Two configurations: a model takes its attention from the object it was made with.
            base = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=TREE_ATTENTION)
            plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
            with torch.no_grad():
                for parameter in base.parameters():  # norms and biases too, which start as constants
                    parameter.normal_(std=0.3)
        plain.load_state_dict(base.state_dict())
        self.tree = PolicyModel(base.double())
        self.tree.set_adapter(LORA, None)
        weights = random_weights(self.tree)
        self.tree.set_adapter(LORA, weights)
        plain = exact(plain.eval())
        self.plain = peft.get_peft_model(plain, self.tree.adapter_config(LORA))
        peft.set_peft_model_state_dict(self.plain, weights)

    def compare(self, calls: list[TreeCall]) -> None:
        """Hidden states of each call, and the adapter's gradients of a random function of all of them."""
        pack = build_tree(calls)
        self.tree.set_adapter(
            LORA, {name: parameter.detach().clone() for name, parameter in self.tree.parameters.items()}
        )
        hidden = self.tree.hidden(pack)
        prefixes: list[tuple[int, ...]] = []
        for token, parent in zip(pack.token_ids.tolist(), pack.parents.tolist(), strict=True):
            prefixes.append(((*prefixes[parent], token)) if parent >= 0 else (token,))
        nodes = {prefix: node for node, prefix in enumerate(prefixes)}
        generator = torch.Generator().manual_seed(len(calls))
        slopes = torch.zeros_like(hidden)
        self.plain.zero_grad()
        for call in calls:
            own = [nodes[tuple(call.path[: depth + 1])] for depth in range(len(call.path))]
            expected = self.plain.get_base_model().get_decoder()(torch.tensor([call.path])).last_hidden_state[0]
            torch.testing.assert_close(hidden[own], expected, rtol=1e-9, atol=1e-11)
            slope = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
            expected.backward(slope)
            slopes.index_add_(0, torch.tensor(own), slope)
        hidden.backward(slopes)
        for name, parameter in self.plain.named_parameters():
            if parameter.requires_grad:
                ours = self.tree.parameters[name.replace(".default.", ".")].grad
                scale = float(parameter.grad.abs().max())
                torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-11 * max(scale, 1.0), msg=name)


@pytest.fixture(scope="module", params=STYLES.values(), ids=STYLES.keys())
def styled(request: pytest.FixtureRequest) -> Styled:
    return Styled(request.param)


short = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=short,
    branches=st.lists(st.tuples(st.lists(short, max_size=3), short), min_size=1, max_size=5),
    checkpointing=st.booleans(),
)
def test_tree_equals_separate_rows(
    styled: Styled, prompt: list[int], branches: list[tuple[list[list[int]], list[int]]], checkpointing: bool
) -> None:
    calls = [
        TreeCall([*prompt, *chain(*history)], sampled, [0.0] * len(sampled), 1.0, 1.0) for history, sampled in branches
    ]
    styled.tree.checkpointing = checkpointing
    styled.compare(calls)


@pytest.mark.parametrize("config", STYLES.values(), ids=STYLES.keys())
def test_nodes_take_the_place_of_norms_and_activations(config: PretrainedConfig) -> None:
    base = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=TREE_ATTENTION)
    model = PolicyModel(base)
    model.set_adapter(LORA, None)
    nodes: Counter[str] = Counter()
    pending = [model.hidden(build_tree([TreeCall([1, 2], [3], [0.0], 1.0, 1.0)])).grad_fn]
    seen = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes[type(node).__name__] += 1
            pending += [following for following, _ in node.next_functions]
    linears = sum(isinstance(module, peft.tuners.lora.LoraLayer) for module in base.modules())
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in base.modules())
    assert nodes["_LoraLinearBackward"] == linears == 14
    assert nodes["GatedBackward"] == nodes["_FlashOverSegmentsBackward"] == 2
    assert nodes["RmsNormBackward"] == norms - 1  # the first one's input needs no gradient
    assert not {"PowBackward0", "SiluBackward0", "GeluBackward0"} & nodes.keys()


def test_checkpointing_keeps_less_and_changes_no_bit(model: PolicyModel) -> None:
    model.set_adapter(LORA, None)
    model.set_adapter(LORA, random_weights(model))
    pack = build_tree([TreeCall([1, 2, 3], [end, 5, 6], [0.0] * 3, 1.0, 1.0) for end in range(5, 15)])
    results, sizes = [], []
    for model.checkpointing in (False, True):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.nbytes) or x, lambda x: x):
            hidden = model.hidden(pack)
        sizes.append(sum(kept))
        hidden.sum().backward()
        results.append([hidden.detach(), *(parameter.grad.clone() for parameter in model.parameters.values())])
        for parameter in model.parameters.values():
            parameter.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert sizes[1] < sizes[0] / 10
    with torch.no_grad():
        assert torch.equal(model.hidden(pack), results[0][0])


def test_adapter_on_chosen_layers(model: PolicyModel) -> None:
    lora = LoraConfig(rank=2, targets=["v_proj", "q_proj"])
    model.set_adapter(lora, None)
    assert {name.split(".")[-3] for name in model.parameters} == {"q_proj", "v_proj"}
    assert model.adapter_config(lora).target_modules == {"q_proj", "v_proj"}
    model.set_adapter(LoraConfig(rank=2), None)
    assert {name.split(".")[-3] for name in model.parameters} == set(model.targets)
    with pytest.raises(ValueError, match=r"cannot be trained or served: this base model takes any of \['down_proj"):
        model.set_adapter(LoraConfig(targets=["q_proj", "lm_head"]), None)


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_packed_base_computes_with_the_unpacked_weights(quantization: Literal["4bit", "8bit"], tmp_path: Path) -> None:
    """What a plain model computes whose weights were rounded as bitsandbytes rounds them; gradients too."""
    whole = LlamaForCausalLM(LlamaConfig(**SHAPE | {"hidden_size": 64, "intermediate_size": 64}))
    whole.save_pretrained(tmp_path)
    packed = PolicyModel.load(tmp_path, "cpu", quantization)
    plain = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=TREE_ATTENTION)
    changed = 0.0
    for name, module in packed.base.named_modules():
        if name.endswith("_proj"):
            assert not module.weight.is_floating_point()
            rounded = unpacked(module, torch.float32).detach()
            changed = max(changed, float((rounded - plain.get_submodule(name).weight.detach()).abs().max()))
            with torch.no_grad():
                plain.get_submodule(name).weight.copy_(rounded)
    assert changed > 1e-4
    reference = PolicyModel(plain)
    pack = build_tree([TreeCall([1, 2, 3], [end, 5, 6], [0.0] * 3, 1.0, 1.0) for end in (7, 8)])
    gradients = []
    for model in (packed, reference):
        model.set_adapter(LORA, None)
        model.set_adapter(LORA, random_weights(model))
        hidden = model.hidden(pack)
        hidden.square().sum().backward()
        gradients.append([hidden.detach(), *(parameter.grad for parameter in model.parameters.values())])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_recurrent_model_is_refused() -> None:
    base = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match="'mamba' with recurrent layers"):
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
