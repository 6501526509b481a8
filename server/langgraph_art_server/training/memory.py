"""Memory of the trainer: how many tokens fit into one forward and backward pass, when it ran out, giving it back.

Invariant: the budget is decided once, when the worker starts, from what is free then and from what a token of this
model was measured to keep; what runs out nevertheless is answered by a smaller plan (``back_off``).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil
import torch
from torch import Tensor

from langgraph_art.protocol import LoraConfig
from langgraph_art_server.training.head import CHUNK_ROWS
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.tree import TreeCall, build_tree

SHARE = 0.6
"""Part of the free memory that is planned with. The rest is for what allocators cannot reuse and for neighbours."""

LARGEST = 16_384
"""Largest budget: longer passes are no faster."""

COMFORTABLE = 4_096
"""Budget from which on nothing is computed twice to save memory: it holds most groups' trees as a whole."""

SMALLEST = 64
"""Smallest budget. Where even this does not fit, the model does not."""

_PROBE_TOKENS = 32


def plan_passes(model: PolicyModel, free: int, token_budget: int | None = None) -> tuple[int, bool]:
    """Decides on tokens per pack and on gradient checkpointing, without running out of memory to find out.

    Args:
        model: The base model. Its adapter is replaced, and a few tokens are run through it.
        free: Bytes to plan with, see :func:`free_memory`.
        token_budget: Tokens per pack if they are decided already.

    Returns:
        Tokens per pack, and whether activations must be computed again in the backward pass for them to fit.
    """
    layers = model.base.config.num_hidden_layers
    kept, residual = _bytes_per_token(model)
    # The layer at work holds its activations, their gradients and what the kernels need in between; around the layers
    # a few more tensors of the size of the hidden states exist.
    working = 3 * kept / layers + 4 * residual
    logits = 4 * CHUNK_ROWS * model.vocabulary * 4  # float32, and what is made of them
    spare = max(0.0, SHARE * free - logits)
    whole = int(spare / (kept + working))
    if token_budget is not None:
        return token_budget, whole < token_budget
    if whole >= COMFORTABLE:
        return min(whole, LARGEST), False
    # Of each layer its input is kept, and what attention gave it.
    return max(SMALLEST, min(int(spare / (2 * layers * residual + working)), LARGEST)), True


def _bytes_per_token(model: PolicyModel) -> tuple[float, float]:
    """Measures what a token's forward pass keeps for the backward pass, weights aside, and the size of its state."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.base.state_dict().values()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.set_adapter(LoraConfig(), None)
    pack = build_tree([TreeCall([1] * _PROBE_TOKENS, [1], [0.0], 1.0, 0.0)]).to(model.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.hidden(pack)
    return sum(kept.values()) / len(pack), hidden.nbytes / len(pack)


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still have on a device, a container's limit included."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # no such limit here
        return free
    cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return free if limit == "max" else max(0, min(free, int(limit) - used + cached))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the accelerator or on the CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def release_memory(device: torch.device) -> None:
    """Gives what allocators hold on to back, for the engine that shares the machine."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
