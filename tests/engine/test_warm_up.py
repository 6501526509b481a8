"""Fine-tuning and distillation on the real engine: what is taught is served, and the teacher is a real vLLM."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from langchain_core.messages import HumanMessage, SystemMessage
from transformers import AutoModelForCausalLM, AutoTokenizer

from langgraph_art import ChatART, Client, EmbeddedServer, SftConfig, TrainConfig, rollout
from langgraph_art.errors import TrainingFailed
from langgraph_art.runs import RunGroup

from .graphs import one_node

pytestmark = pytest.mark.engine
QUESTION, ANSWER = "What is the capital of Peru?", "Lima, of course."
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
    ]
}
TEACH = SftConfig(learning_rate=3e-3, epochs=15)


def groups_of(server: EmbeddedServer, policy: str, n: int = 4) -> list[RunGroup]:
    graph = one_node(server.url, policy, max_tokens=4)
    groups = rollout(graph, [{"text": QUESTION}], n=n, reward=lambda run: 0.0, progress=False)
    for rank, run in enumerate(groups[0].runs):
        run.reward = float(rank)
    return groups


def test_what_is_taught_is_said_and_rl_goes_on_from_it(server: EmbeddedServer, client: Client, policy: str) -> None:
    llm = ChatART(model=policy, base_url=f"{server.url}/v1", temperature=0, max_tokens=16)
    question = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    assert llm.invoke(question).content != ANSWER
    result = client.sft(policy, [CHAT], config=TEACH)
    (update,) = result.updates
    assert result.skipped == {}
    assert update.losses[0] > 3
    assert update.losses[-1] < 0.1
    answer = llm.invoke(question)
    assert answer.content == ANSWER
    assert answer.response_metadata["finish_reason"] == "stop", "the end token was taught too"
    assert answer.response_metadata["model_name"] == f"{policy}@1"
    # An answer that the server recorded is the same example: exact tokens instead of a template.
    calls = [call for run in groups_of(server, policy)[0].runs for call in run.calls]
    assert client.sft(policy, calls, config=SftConfig(learning_rate=1e-6)).updates[0].calls == len(calls)

    config = TrainConfig(kl=0.1, kl_reference={policy: 1})
    (update,) = client.train(groups_of(server, policy), config=config).updates
    assert (update.parent, update.version, update.metrics["step"]) == (2, 3, 1)
    assert 0 <= update.metrics["kl"] < 1e-3, "version 2 is almost version 1; the base model is far away"
    with pytest.raises(TrainingFailed, match=rf"policy '{policy}' has no version 9; it has 0, 1, 2, 3"):
        client.train(groups_of(server, policy), config=TrainConfig(kl=0.1, kl_reference={policy: 9}))


@contextmanager
def listening(port: int, target: int) -> Iterator[None]:
    """Hand connections to ``port`` on to ``target``, both on this machine."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)

    async def end() -> None:
        listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listener = asyncio.run_coroutine_threadsafe(asyncio.start_server(connect, "127.0.0.1", port), loop).result(10)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def engine_port(server: EmbeddedServer) -> int:
    """Where the server's vLLM listens."""
    for process in psutil.Process().children(recursive=True):
        command = process.cmdline()
        if "vllm.entrypoints.openai.api_server" in command:
            port = int(command[command.index("--port") + 1])
            models = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=30).json()["data"]
            if any(model["id"] == "tiny" for model in models):
                return port
    raise AssertionError(f"the engine of {server.url} was not found")


def test_a_policy_comes_closer_to_its_teacher(
    server: EmbeddedServer, client: Client, policy: str, tiny_model: Path, teacher_port: int
) -> None:
    """The teacher is the base model, served by a real vLLM; the policy was taught something else before."""
    client.sft(policy, [CHAT], config=SftConfig(learning_rate=1e-3, epochs=6))
    config = TrainConfig(teacher="local", distill=1.0, learning_rate=1e-3)
    divergences = []
    with listening(teacher_port, engine_port(server)):
        for step in range(5):
            groups = groups_of(server, policy, 16)
            for run in groups[0].runs:
                run.reward = 1.0  # no signal: only the teacher is left to learn from
            (update,) = client.train(groups, config=config).updates
            divergences.append(update.metrics["teacher_kl"])
            if step == 0:
                recorded = [call for run in groups[0].runs for call in client.calls(run.run_id)]
                assert update.calls == len(recorded) == 16
                base = AutoModelForCausalLM.from_pretrained(tiny_model)
                differences = []
                for call in recorded:
                    with torch.no_grad():
                        log_p = torch.log_softmax(
                            base(torch.tensor([call.prompt_ids + call.sampled_ids])).logits[0], -1
                        )
                    for place, (token, logprob) in enumerate(zip(call.sampled_ids, call.logprobs, strict=True)):
                        differences.append(float(log_p[len(call.prompt_ids) - 1 + place, token]) - logprob)
                difference = torch.tensor(differences)
                expected = float((difference.expm1() - difference).mean())
                assert update.metrics["teacher_kl"] == pytest.approx(expected, rel=1e-2, abs=1e-4)
    assert sum(divergences[-2:]) / 2 < divergences[0] / 2


def test_the_template_that_is_served_makes_the_tokens(
    server: EmbeddedServer, client: Client, policy: str, tiny_model: Path
) -> None:
    """Tokens of the fine-tuning equal those of transformers with the model's own template."""
    (update,) = client.sft(policy, [CHAT], config=SftConfig(learning_rate=1e-9)).updates
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer.apply_chat_template(CHAT["messages"][:-1], add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode(ANSWER + "<|im_end|>", add_special_tokens=False)
    assert update.trained_tokens == len(answer)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        log_p = torch.log_softmax(base(torch.tensor([prompt + answer])).logits[0], -1)
    expected = -sum(float(log_p[len(prompt) - 1 + place, token]) for place, token in enumerate(answer)) / len(answer)
    assert update.losses == [pytest.approx(expected, abs=1e-3)]


def test_the_page_runs(server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "warm-up.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    monkeypatch.setenv("LANGGRAPH_ART_URL", server.url)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "warm-up.md", "exec"), names)
    assert names["result"].updates[0].version == 1
    assert len(names["result"].updates[0].losses) == 3
