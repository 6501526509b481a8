"""Loss and gradients against TRL's GRPOTrainer on the same tokens, wherever TRL has the method.

TRL runs its own code from the recorded rollout to the loss: advantages, masks, corrections, reference logprobs, loss.
It computes logprobs in float32, hence the tolerances. Where definitions differ, a test says by how much.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from langgraph_art.protocol import TrainConfig
from langgraph_art_server.training.objective import reinforcement
from langgraph_art_server.training.passes import accumulate_gradients, entry_logprobs
from langgraph_art_server.training.plan import plan_update
from langgraph_art_server.training.task import TaskGroup
from langgraph_art_server.training.tree import Pack, TreeCall

from .conftest import VOCABULARY, exact, tiny_llama
from .reference import Pair, assert_same_gradients
from .tasks import LORA, call, group
from .test_gradients import policy

pytestmark = pytest.mark.slow

END = 2
REWARDS = [1.0, 0.0, 0.6, 0.25, 0.0, 0.3]
PROMPTS = [[5, 6, 7]] * 3 + [[5, 8]] * 3
ANSWERS = [[3, 4, END], [3, 9, 9, 11, END], [6, END], [7, 12, 13], [9, END], [3, 4, 20, END]]
"""Two groups of three runs of one call. The fourth answer was cut at its token limit."""
FULL = 6
"""Most tokens of an answer: TRL's ``max_completion_length``."""


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.fixture(scope="module")
def behaviour(pair: Pair) -> list[list[float]]:
    """The policy's own logprobs with noise, so that corrections have something to do."""
    generator = torch.Generator().manual_seed(4)
    logprobs = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        own, _ = pair.plain_logprobs(TreeCall(prompt, answer, [], 1.0, 0.0))
        noise = torch.randn(own.shape, generator=generator, dtype=torch.float64) * 0.8
        logprobs.append((own.detach() + noise).clamp(max=0).tolist())
    return logprobs


def old_of(logprobs: Tensor) -> Tensor:
    """Logprobs of a policy that the current one has moved away from, as a function of the behaviour logprobs."""
    return 0.9 * logprobs - 0.1


def trl_loss(
    pair: Pair,
    behaviour: list[list[float]],
    *,
    rewards: list[float] = REWARDS,
    stepped: bool = False,
    use_vllm: bool = False,
    **options: Any,
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """TRL's loss, its gradients and its metrics."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    trl = pytest.importorskip("trl", exc_type=ImportError)
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(index): index for index in range(VOCABULARY)}, unk_token="0"))
    trainer = trl.GRPOTrainer(
        model=exact(tiny_llama(attention="sdpa")),
        reward_funcs=lambda prompts, completions, **_: rewards,
        args=trl.GRPOConfig(
            output_dir="unused",
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
            per_device_train_batch_size=len(ANSWERS),
            num_generations=3,
            max_completion_length=FULL,
            **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["5", "8"]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token=str(END)),
        peft_config=pair.tree.adapter_config(LORA),
        rollout_func=lambda prompts, trainer: {
            "prompt_ids": PROMPTS,
            "completion_ids": ANSWERS,
            "logprobs": behaviour,
        },
    )
    peft.set_peft_model_state_dict(trainer.model, pair.weights)
    trainer.use_vllm = use_vllm  # it only asks vLLM for the rollout, which is given
    trainer._last_loaded_step = trainer.state.global_step
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "unused"}] * len(ANSWERS))
    if stepped:
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in behaviour], batch_first=True)
        inputs["old_per_token_logps"] = old_of(padded)
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    return loss.item(), gradients, {name: values[-1] for name, values in trainer._metrics["train"].items() if values}


def groups_of(behaviour: list[list[float]], rewards: list[float], keep: Callable[[int], bool]) -> list[TaskGroup]:
    calls = [
        [call(PROMPTS[index], ANSWERS[index], logprobs=behaviour[index])] if keep(index) else []
        for index in range(len(ANSWERS))
    ]
    return [group(*[(rewards[index], calls[index]) for index in indices]) for indices in (range(3), range(3, 6))]


def our_loss(
    pair: Pair,
    behaviour: list[list[float]],
    config: TrainConfig,
    *,
    rewards: list[float] = REWARDS,
    stepped: bool = False,
    keep: Callable[[int], bool] = lambda index: True,
) -> tuple[float, dict[str, float]]:
    """Our loss and metrics, from groups to gradients; the gradients stay in the model."""
    groups = groups_of(behaviour, rewards, keep)
    # One minibatch for the plan: TRL's ``old_per_token_logps`` are of the whole batch too.
    plan = plan_update(
        policy(groups), config.model_copy(update={"minibatches": 1}), vocabulary=VOCABULARY, token_budget=9
    )
    return gradients_of(pair, plan.packs, config, stepped=stepped)


def gradients_of(
    pair: Pair, packs: list[Pack], config: TrainConfig, *, stepped: bool
) -> tuple[float, dict[str, float]]:
    reference = None
    if config.kl:
        pair.tree.set_adapter(LORA, None)
        reference = entry_logprobs(pair.tree, packs, lambda: None)
    pair.tree.set_adapter(LORA, pair.weights)
    loss, measures = accumulate_gradients(
        pair.tree,
        packs,
        lambda sampled, entries: reinforcement(sampled, entries, config),
        lambda: None,
        old=[old_of(pack.entry_logprobs) for pack in packs] if stepped else None,
        reference=reference,
        entropy_gradient=bool(config.entropy),
    )
    return loss, {name: float(values.mean()) for name, values in measures.items()}


def assert_agree(
    pair: Pair, theirs: tuple[float, dict[str, Tensor], dict[str, float]], ours: tuple[float, dict[str, float]]
) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=2e-5, abs=1e-6)
    assert_same_gradients(pair.tree_gradients(), theirs[1], rtol=1e-4)
    assert ours[1]["entropy"] == pytest.approx(theirs[2]["entropy"], rel=1e-5)


METHODS = {
    "grpo": ({"loss_type": "grpo"}, TrainConfig.preset("grpo", minibatches=2)),
    "bnpo": ({"loss_type": "bnpo"}, TrainConfig(weight="token", minibatches=2)),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, TrainConfig.preset("dapo", minibatches=2)),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        TrainConfig.preset("dr_grpo", constant_tokens=FULL, minibatches=2),
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        TrainConfig.preset("gspo", minibatches=2),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, TrainConfig.preset("cispo", minibatches=2)),
    "wide": (
        {"loss_type": "grpo", "epsilon": 0.7, "epsilon_high": 1.4},
        TrainConfig(epsilon_low=0.7, epsilon_high=1.4, minibatches=2),
    ),
}
"""TRL's options and ours. TRL's ``epsilon_high`` of CISPO is the limit itself, ours its distance from 1."""


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_method(pair: Pair, behaviour: list[list[float]], method: str, stepped: bool) -> None:
    options, config = METHODS[method]
    theirs = trl_loss(pair, behaviour, stepped=stepped, **options)
    ours = our_loss(pair, behaviour, config, stepped=stepped)
    assert_agree(pair, theirs, ours)
    if stepped and method != "cispo":
        # TRL takes the mean of sequence-level clip fractions over sequences, ours is over tokens.
        if method != "gspo":
            assert ours[1]["clip_low"] == pytest.approx(theirs[2]["clip_ratio/low_mean"], rel=1e-5)
            assert ours[1]["clip_high"] == pytest.approx(theirs[2]["clip_ratio/high_mean"], rel=1e-5)
        assert ours[1]["clip_low"] + ours[1]["clip_high"] > 0


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_scale_rewards(pair: Pair, behaviour: list[list[float]], scale: str) -> None:
    theirs = trl_loss(pair, behaviour, loss_type="grpo", scale_rewards=scale)
    assert_agree(pair, theirs, our_loss(pair, behaviour, TrainConfig(scale=scale)))


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("method", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_kl(pair: Pair, behaviour: list[list[float]], method: str, stepped: bool) -> None:
    options, config = METHODS[method]
    theirs = trl_loss(pair, behaviour, stepped=stepped, beta=0.3, **options)
    ours = our_loss(pair, behaviour, config.model_copy(update={"kl": 0.3}), stepped=stepped)
    assert_agree(pair, theirs, ours)
    assert ours[1]["kl"] == pytest.approx(theirs[2]["kl"], rel=1e-4)


def test_kl_with_sequence_ratios_differs(pair: Pair, behaviour: list[list[float]]) -> None:
    """TRL multiplies each token's KL by the ratio of its sequence, which leaves a gradient that is not the KL's."""
    options, config = METHODS["gspo"]
    theirs = trl_loss(pair, behaviour, beta=0.3, **options)
    ours = our_loss(pair, behaviour, config.model_copy(update={"kl": 0.3}))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4), "both ratios are 1"
    with pytest.raises(AssertionError):
        assert_same_gradients(pair.tree_gradients(), theirs[1], rtol=1e-2)


@pytest.mark.parametrize("limit", [1.2, 1.5])
@pytest.mark.parametrize(
    ("mode", "correction"),
    [("token_truncate", "token_truncation"), ("token_mask", "token_mask"), ("sequence_mask", "sequence_mask")],
)
def test_corrections(pair: Pair, behaviour: list[list[float]], mode: str, correction: str, limit: float) -> None:
    theirs = trl_loss(
        pair,
        behaviour,
        use_vllm=True,
        loss_type="dapo",
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=limit,
    )
    config = TrainConfig.preset("dapo", correction=correction, correction_limit=limit)
    ours = our_loss(pair, behaviour, config)
    assert_agree(pair, theirs, ours)
    assert 0 < ours[1]["correction_share"] < 1
    assert ours[1]["mismatch_mean"] == pytest.approx(theirs[2]["sampling/sampling_logp_difference/mean"], rel=1e-5)


def test_correction_of_the_kl_differs(pair: Pair, behaviour: list[list[float]]) -> None:
    """We correct the KL like the rest, as it is estimated on the same tokens; TRL leaves it alone."""
    shared = {"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
    plain = trl_loss(pair, behaviour, vllm_importance_sampling_clip_max=2.0, **shared)[0]
    with_kl = trl_loss(pair, behaviour, vllm_importance_sampling_clip_max=2.0, beta=0.3, **shared)[0]
    config = TrainConfig.preset("dapo", correction="token_truncation", kl=0.3)
    ours, metrics = our_loss(pair, behaviour, config)
    assert with_kl == pytest.approx(plain + 0.3 * metrics["kl"], rel=1e-4)
    assert ours != pytest.approx(with_kl, rel=1e-2)


def test_entropy(pair: Pair, behaviour: list[list[float]]) -> None:
    """TRL's bonus is the mean over tokens whatever the loss type; ours has the weights of the loss."""
    theirs = trl_loss(pair, behaviour, loss_type="dapo", entropy_coef=0.2)
    assert_agree(pair, theirs, our_loss(pair, behaviour, TrainConfig.preset("dapo", entropy=0.2)))
    theirs = trl_loss(pair, behaviour, loss_type="grpo", entropy_coef=0.2)
    ours = our_loss(pair, behaviour, TrainConfig(entropy=0.2))
    assert ours[0] != pytest.approx(theirs[0], rel=1e-3)


def test_truncated(pair: Pair, behaviour: list[list[float]]) -> None:
    """A cut answer's reward stays in its group's mean. TRL's grpo still counts its row in the mean over rows."""
    cut = [index for index, answer in enumerate(ANSWERS) if answer[-1] != END]
    assert cut == [3]

    def keep(index: int) -> bool:
        return index not in cut

    theirs = trl_loss(pair, behaviour, loss_type="dapo", mask_truncated_completions=True)
    ours = our_loss(pair, behaviour, TrainConfig.preset("dapo"), keep=keep)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    assert_same_gradients(pair.tree_gradients(), theirs[1], rtol=1e-4)

    theirs = trl_loss(pair, behaviour, loss_type="grpo", mask_truncated_completions=True)
    ours = our_loss(pair, behaviour, TrainConfig(), keep=keep)
    assert ours[0] * 5 / 6 == pytest.approx(theirs[0], rel=1e-4)


def test_group_without_signal(pair: Pair, behaviour: list[list[float]]) -> None:
    """TRL counts the rows of a group of equal rewards in its mean; here they are not part of the loss."""
    rewards = [1.0, 0.0, 0.6, 0.1, 0.1, 0.1]
    theirs = trl_loss(pair, behaviour, rewards=rewards, loss_type="grpo")
    ours = our_loss(pair, behaviour, TrainConfig(), rewards=rewards)
    assert ours[0] / 2 == pytest.approx(theirs[0], rel=1e-4, abs=1e-6)
    halved = {name: gradient / 2 for name, gradient in pair.tree_gradients().items()}
    assert_same_gradients(halved, theirs[1], rtol=1e-4)
