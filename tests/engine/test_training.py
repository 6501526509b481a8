"""The whole way on the real engine: rollouts, a reward, an update, a hot swap, and behaviour that has changed."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import httpx
import pytest
from langchain_core.messages import HumanMessage
from peft import PeftModel
from transformers import AutoModelForCausalLM

from langgraph_art import ChatART, Client, EmbeddedServer, GraphRun, TrainConfig, Trainer, record, rollout
from langgraph_art.errors import ServerRefused

from .graphs import one_node

pytestmark = pytest.mark.engine
TEXT = "Say something."


def first_token(server: EmbeddedServer, model: str) -> dict[str, float]:
    """Probability of the ten likeliest first tokens, likeliest first."""
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": model,
            "messages": [{"role": "user", "content": TEXT}],
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": 20,
        },
        timeout=60,
    ).json()
    (position,) = answer["choices"][0]["logprobs"]["content"]
    # Of the twenty that vLLM lists, one is the token that it sampled, likely or not.
    likely = {token["token"]: math.exp(token["logprob"]) for token in position["top_logprobs"]}
    return dict(sorted(likely.items(), key=lambda item: item[1], reverse=True)[:10])


def test_the_rewarded_behaviour_becomes_likelier_and_the_punished_one_rarer(
    server: EmbeddedServer, client: Client, policy: str
) -> None:
    before = first_token(server, policy)
    rewarded, punished = [token for token in before if token.strip()][:2]

    def reward(run: GraphRun) -> float:
        said = run.output["answer"]
        return float(said == rewarded) - float(said == punished)

    trainer = Trainer(
        one_node(server.url, policy),
        [{"text": TEXT}],
        reward,
        policies=[policy],
        url=server.url,
        runs_per_input=16,
        inputs_per_step=1,
        config=TrainConfig(learning_rate=5e-3),
        progress=False,
    )
    history = trainer.fit(6)
    after = first_token(server, policy)
    assert after.get(rewarded, 0.0) > before[rewarded] + 0.1
    assert after.get(punished, 0.0) < before[punished]
    versions = [log.versions[policy] for log in history.steps]
    assert versions == sorted(versions)
    assert client.policies.get(policy).version == versions[-1] > 0
    # The sampler and the trainer compute the same model.
    assert all(log.metrics[policy].get("mismatch_max", 0.0) < 1e-2 for log in history.steps)
    # Every version that was trained can still be asked for, and the first is the untrained model.
    again = first_token(server, f"{policy}@0")
    assert again == pytest.approx(before, abs=1e-4)


def trained_groups(server: EmbeddedServer, policy: str, n: int = 4) -> list:
    graph = one_node(server.url, policy, max_tokens=4)
    groups = rollout(graph, [{"text": TEXT}], n=n, reward=lambda run: float(len(run.run_id)), progress=False)
    for rank, run in enumerate(groups[0].runs):
        run.reward = float(rank)
    return groups


def test_a_run_is_pinned_and_the_next_one_sees_the_new_version(
    server: EmbeddedServer, client: Client, policy: str
) -> None:
    llm = ChatART(model=policy, base_url=f"{server.url}/v1", max_tokens=2)
    with record() as during:
        llm.invoke([HumanMessage(TEXT)])
        result = client.train(trained_groups(server, policy))
        llm.invoke([HumanMessage(TEXT)])
    with record() as later:
        llm.invoke([HumanMessage(TEXT)])
    assert [update.version for update in result.updates] == [1]
    assert [call.version for call in during.calls] == [f"{policy}@0"] * 2
    assert [call.version for call in later.calls] == [f"{policy}@1"]


def test_the_same_submission_is_trained_once(server: EmbeddedServer, client: Client, policy: str) -> None:
    groups = trained_groups(server, policy)
    first = client.train(groups, idempotency_key="once-" + policy)
    again = client.train(groups, idempotency_key="once-" + policy)
    assert again == first
    assert client.policies.get(policy).version == 1
    replayed = client.train(groups, idempotency_key="replay-" + policy)
    assert replayed.updates == []
    assert replayed.skipped["call:stale_version"] + replayed.skipped.get("run:already_trained", 0) >= 4
    groups[0].runs[0].reward = 99.0
    with pytest.raises(ServerRefused, match="idempotency key"):
        client.train(groups, idempotency_key="once-" + policy)


def test_groups_without_signal_are_counted_and_train_nothing(
    server: EmbeddedServer, client: Client, policy: str
) -> None:
    groups = trained_groups(server, policy)
    for run in groups[0].runs:
        run.reward = 0.1
    result = client.train(groups)
    assert result.skipped == {"group:no_signal": 1}
    assert [(update.version, update.parent) for update in result.updates] == [(0, 0)]
    assert client.policies.get(policy).version == 0


def test_the_checkpoint_is_a_peft_folder(
    server: EmbeddedServer, client: Client, policy: str, tiny_model: Path, tmp_path: Path
) -> None:
    client.train(trained_groups(server, policy))
    data_dir = server.log_path.parent
    (directory,) = (data_dir / "checkpoints" / policy).iterdir()
    assert not list(directory.glob("*.bin"))
    assert not list(directory.glob("*.pt"))
    assert json.loads((directory / "adapter_config.json").read_text())["r"] == 16
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), directory)
    assert any(parameter.abs().sum() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)


async def test_calls_wait_for_an_update_instead_of_failing(server: EmbeddedServer, client: Client, policy: str) -> None:
    llm = ChatART(model=policy, base_url=f"{server.url}/v1", max_tokens=3, max_retries=0)
    groups = await asyncio.to_thread(trained_groups, server, policy, 8)
    training = asyncio.create_task(asyncio.to_thread(client.train, groups))
    answers = 0
    while not training.done():
        await asyncio.gather(*(llm.ainvoke([HumanMessage(TEXT)]) for _ in range(4)))
        answers += 4
    assert (await training).updates[0].version == 1
    assert answers >= 4
