"""The base model with one LoRA adapter on it: one base in memory, the adapter's weights swapped for each policy.

Invariant: everything but the adapter is frozen and nothing here is random beyond the adapter's seed: no dropout, and
the untrained adapter is the same on every device. A model that cannot be computed as a tree is refused when loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from langgraph_art.protocol import LoraConfig
from langgraph_art_server.lora_targets import SERVED_LINEARS
from langgraph_art_server.training.attention import TREE_ATTENTION, Tree
from langgraph_art_server.training.fused import fuse
from langgraph_art_server.training.lora import fuse_lora, unpack_in_use
from langgraph_art_server.training.support import unsupported
from langgraph_art_server.training.tree import Pack, TreeCall, build_tree

Quantization = Literal["4bit", "8bit"]
"""How bitsandbytes packs the base model's linear layers: NF4 (https://arxiv.org/abs/2305.14314) or 8-bit integers with
a scale for each row (https://arxiv.org/abs/2208.07339)."""


class PolicyModel:
    """A frozen base model and the adapter of the policy at work.

    Args:
        base: A causal language model whose attention is :data:`TREE_ATTENTION`.

    Raises:
        ValueError: If the model cannot be trained exactly, or has no layer that vLLM serves LoRA on.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        if problem := unsupported(base.config.to_dict()):
            raise ValueError(problem)
        self.base = base.eval().requires_grad_(False)
        self.base_parameters = sum(parameter.numel() for parameter in base.parameters())
        self.targets = _served_linears(base)
        """Names of the linear layers that get an adapter."""
        self.parameters: dict[str, nn.Parameter] = {}
        """The adapter's weights, by their names in a PEFT folder. Empty until :meth:`set_adapter`."""
        self._peft: peft.PeftModel | None = None
        self.checkpointing = False
        """Whether the backward pass computes each layer once more instead of keeping what the forward pass made: less
        memory, about a third more time, the same result."""
        self._shape: tuple[int, float, list[str]] | None = None
        unpack_in_use(base)
        fuse(base)
        for module in base.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.forward = partial(self._layer, module.forward)
        self._refuse_mixing()

    @classmethod
    def load(
        cls, directory: Path, device: Literal["cpu", "cuda"], quantization: Quantization | None = None
    ) -> PolicyModel:
        """Loads a base model: float32 on the CPU, bfloat16 on CUDA (adapters are float32 on both).

        Args:
            directory: Local directory in ``transformers``' layout; nothing is downloaded.
            device: Where to compute.
            quantization: How to pack the linear layers; ``None`` leaves them as they are stored. They are still
                multiplied in the types above, and gradients are those of the packed weights.
        """
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        packed = quantization and BitsAndBytesConfig(
            load_in_4bit=quantization == "4bit",
            load_in_8bit=quantization == "8bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
        )
        base = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            device_map=device,
            quantization_config=packed,
            attn_implementation=TREE_ATTENTION,
            local_files_only=True,
        )
        return cls(base)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.head.weight.device

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model has an embedding for."""
        return int(self.base.get_input_embeddings().weight.shape[0])

    @property
    def head(self) -> nn.Linear:
        """The output embedding."""
        head: nn.Linear = self.base.get_output_embeddings()
        return head

    def adapter_config(self, lora: LoraConfig) -> peft.LoraConfig:
        """Returns PEFT's description of a policy's adapter."""
        return peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT declares an int, but only divides it by the rank
            lora_dropout=0.0,
            target_modules=self._targets(lora),
            task_type="CAUSAL_LM",
        )

    def set_adapter(self, lora: LoraConfig, weights: dict[str, Tensor] | None) -> None:
        """Puts a policy's adapter onto the base, in the place of the one before, with gradients cleared.

        Args:
            lora: Its shape and seed.
            weights: Its weights by their names in a PEFT folder; ``None`` makes the untrained adapter from the seed
                (A uniform within ``1/sqrt(in_features)``, as PEFT does by default; B zero).

        Raises:
            ValueError: If names or shapes are not those of this adapter on this base model, or the adapter is to sit on
                layers that the engine does not serve.
        """
        if self._shape != (lora.rank, lora.alpha, self._targets(lora)):
            self._attach(lora)
        if weights is None:
            weights = _untrained(self.parameters, lora.seed)
        needed = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if needed != given:
            name = min(set(needed.items()) ^ set(given.items()))[0]
            raise ValueError(
                f"the checkpoint does not fit the base model: {name} has shape {given.get(name)}, "
                f"but the adapter needs {needed.get(name)}; train it with the model and LoRA settings it was made with"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
                parameter.grad = None

    def hidden(self, pack: Pack) -> Tensor:
        """Runs a pack, which must be on the model's device, through all layers.

        Returns:
            [N, hidden]: the hidden states after the final norm, with gradient to the adapter.
        """
        output = self.base.get_decoder()(
            input_ids=pack.token_ids[None],
            position_ids=pack.positions[None],
            use_cache=False,
            tree=Tree(pack.positions, pack.ends, keep=self.checkpointing and torch.is_grad_enabled()),
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _layer(self, forward: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        if not (self.checkpointing and torch.is_grad_enabled()):
            return forward(*args, **options)
        output: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)
        return output

    def _targets(self, lora: LoraConfig) -> list[str]:
        if lora.targets is None:
            return self.targets
        if set(lora.targets) - set(self.targets):
            raise ValueError(
                f"an adapter on {lora.targets} cannot be trained or served: this base model takes any of {self.targets}"
            )
        return sorted(lora.targets)

    def _attach(self, lora: LoraConfig) -> None:
        if self._peft is not None:
            self._peft.unload()
        self._peft = peft.get_peft_model(self.base, self.adapter_config(lora))
        self._shape = (lora.rank, lora.alpha, self._targets(lora))
        fuse_lora(self._peft)
        self.parameters = {
            name.replace(".default.", "."): parameter
            for name, parameter in self._peft.named_parameters()
            if parameter.requires_grad
        }

    def _refuse_mixing(self) -> None:
        """Refuses layers that mix tokens in another way than attention: branches of a tree would touch each other."""
        calls = [TreeCall([1, 2, 3, 4], [token, 5, 6], [0.0] * 3, 1.0, 0.0) for token in (7, 8)]
        with torch.no_grad():
            together = self.hidden(build_tree(calls).to(self.device))[-2:]
            alone = self.hidden(build_tree(calls[1:]).to(self.device))[-2:]
        error = float((together - alone).abs().max() / alone.abs().max())
        if not error < (1e-3 if self.base.dtype != torch.bfloat16 else 5e-2):
            raise ValueError(
                f"a model of type {self.base.config.model_type!r} cannot be trained exactly: tokens see more than the "
                f"tokens before them in their own call (relative error {error:.1e})"
            )


def _served_linears(base: PreTrainedModel) -> list[str]:
    linears = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    if not linears & SERVED_LINEARS:
        raise ValueError(
            f"a model of type {base.config.model_type!r} has no linear layer that vLLM serves LoRA on: "
            f"it has {sorted(linears)}, wanted is any of {sorted(SERVED_LINEARS)}"
        )
    return sorted(linears & SERVED_LINEARS)


def _untrained(parameters: dict[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that the device does not matter
    weights = {}
    for name, parameter in sorted(parameters.items()):
        weights[name] = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            weights[name].uniform_(-bound, bound, generator=generator)
    return weights
