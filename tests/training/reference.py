"""The slow way to every loss: one call at a time, full logits, transformers' and PEFT's own layers, plain loops.

Nothing here is shared with the trainer but the data it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import peft
import torch
from torch import Tensor

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.attention import TREE_ATTENTION
from langgraph_art_server.training.model import PolicyModel
from langgraph_art_server.training.task import TaskCall
from langgraph_art_server.training.tree import TreeCall

from .conftest import exact, random_weights, tiny_llama
from .tasks import LORA


class Pair:
    """The same model and adapter twice, in float64: as the trainer computes it, and as transformers and PEFT do."""

    def __init__(self) -> None:
        self.tree = PolicyModel(exact(tiny_llama(attention=TREE_ATTENTION)))
        self.tree.set_adapter(LORA, None)
        self.weights = random_weights(self.tree)
        self.tree.set_adapter(LORA, self.weights)
        plain = exact(tiny_llama(attention="sdpa"))
        self.plain = peft.get_peft_model(plain, self.tree.adapter_config(LORA))
        self.reset()

    def reset(self) -> None:
        """Puts the weights that both began with back into the plain model, without gradients."""
        peft.set_peft_model_state_dict(self.plain, copy.deepcopy(self.weights))
        self.plain.zero_grad()

    def plain_logprobs(self, call: TaskCall | TreeCall) -> tuple[Tensor, Tensor]:
        """[T] logprobs of the sampled ids and [T] entropies."""
        sampled = torch.tensor(call.sampled_ids)
        logits = self.plain(torch.tensor([call.prompt_ids + call.sampled_ids])).logits[0]
        before = len(call.prompt_ids) - 1
        log_p = torch.log_softmax(logits[before : before + len(sampled)] / call.temperature, -1)
        return log_p[torch.arange(len(sampled)), sampled], -(log_p.exp() * log_p).sum(-1)

    def plain_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {
            name.replace(".default.", "."): parameter
            for name, parameter in self.plain.named_parameters()
            if parameter.requires_grad
        }

    def plain_gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.plain_parameters().items()}

    def tree_gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.tree.parameters.items()}


def reference_loss(
    pair: Pair,
    calls: Sequence[TreeCall],
    config: TrainConfig,
    *,
    old: Callable[[TreeCall], Sequence[float]] | None,
    reference: Callable[[TreeCall], Sequence[float]] | None,
) -> tuple[Tensor, dict[str, list[float]]]:
    """The loss with its graph, and what is measured, one value for each sampled token."""
    total = torch.zeros((), dtype=torch.float64)
    measures: dict[str, list[float]] = {}

    def measure(name: str, value: float | Tensor) -> None:
        measures.setdefault(name, []).append(float(value))

    for call in calls:
        logprobs, entropies = pair.plain_logprobs(call)
        before = logprobs.detach() if old is None else torch.tensor(old(call), dtype=torch.float64)
        rho = torch.exp(before - torch.tensor(call.logprobs, dtype=torch.float64))
        length = len(call.sampled_ids)
        of_call = torch.exp(sum(logprobs - before) / length)
        for t in range(length):
            advantage, ratio = call.advantage, torch.exp(logprobs[t] - before[t])
            low, high, r = config.epsilon_low, config.epsilon_high, float(ratio.detach())
            match config.surrogate:
                case "clip" | "sequence_clip":
                    ours = ratio if config.surrogate == "clip" else of_call
                    defaults = (0.2, 0.2) if config.surrogate == "clip" else (0.0003, 0.0004)
                    least, most = 1 - (low or defaults[0]), 1 + (high or defaults[1])
                    # min(r A, clip(r) A) by cases: a limit counts only on the side that the advantage pushes to.
                    limit = most if advantage > 0 else least
                    outside = float(ours.detach()) > most if advantage > 0 else float(ours.detach()) < least
                    loss = -advantage * (limit + 0 * ours if outside else ours)
                    if old is not None:
                        measure("clip_low", float(ours.detach()) < least and advantage < 0)
                        measure("clip_high", float(ours.detach()) > most and advantage > 0)
                case "cispo":
                    least, most = 1 - low if low else -1.0, 1 + high if high else 5.0
                    loss = -min(max(r, least), most) * advantage * logprobs[t]
                    if old is not None:
                        measure("clip_low", r < least)
                        measure("clip_high", r > most)
                case "reinforce":
                    loss = -advantage * logprobs[t]
            if config.kl:
                assert reference is not None
                loss = loss + config.kl * _kl(logprobs[t], reference(call)[t], ratio, lambda kl: measure("kl", kl))
            if config.teacher:
                assert call.teacher_logprobs is not None
                teacher = call.teacher_logprobs[t]
                loss = loss + config.distill * _kl(logprobs[t], teacher, ratio, lambda kl: measure("teacher_kl", kl))
            factor, limit = 1.0, config.correction_limit or (1.01 if config.correction == "geometric_mask" else 2.0)
            match config.correction:
                case "token_truncation":
                    factor = min(float(rho[t]), limit)
                case "token_mask":
                    factor = float(rho[t]) if float(rho[t]) <= limit else 0.0
                case "sequence_mask":
                    product = float(torch.prod(rho))
                    factor = product if product <= limit else 0.0
                case "geometric_mask":
                    mean = float(torch.prod(rho)) ** (1 / length)
                    factor = 1.0 if 1 / limit <= mean <= limit else 0.0
            if config.correction:
                acted = factor == limit if config.correction == "token_truncation" else factor == 0.0
                measure("correction_share", acted)
            total = total + call.weight * (factor * loss - config.entropy * entropies[t])
            measure("entropy", entropies[t])
            measure("logprob", logprobs[t])
            measure("mismatch_mean", abs(torch.log(rho[t])))
            measure("mismatch_kl", rho[t] - 1 - torch.log(rho[t]))
    return total, measures


def _kl(logprob: Tensor, other: float, ratio: Tensor, measure: Callable[[Tensor], None]) -> Tensor:
    kl = ratio * (torch.exp(other - logprob) - 1 - (other - logprob))
    measure(kl)
    return kl


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=rtol, atol=rtol / 100 * max(largest, 1e-3), msg=name, check_dtype=False
        )
