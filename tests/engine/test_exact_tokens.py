"""What the gateway records is what the engine saw and sampled, checked against an independent computation."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import httpx
import openai
import pytest
import torch
from langchain_core.messages import HumanMessage
from transformers import AutoModelForCausalLM, AutoTokenizer

from langgraph_art import ChatART, Client, EmbeddedServer, attach_tokens, load_runs, record, save_runs

from .graphs import one_node

pytestmark = pytest.mark.engine
PROMPT = [HumanMessage("Where is my parcel?")]


def chat(server: EmbeddedServer, policy: str, **options: object) -> ChatART:
    return ChatART(model=policy, base_url=f"{server.url}/v1", temperature=1.0, **options)


def test_ids_and_logprobs_are_those_of_the_model(
    server: EmbeddedServer, client: Client, policy: str, tiny_model: Path, tmp_path: Path
) -> None:
    with record() as run:
        chat(server, policy, max_tokens=12).invoke(PROMPT)
    (call,) = client.calls(run.run_id)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT[0].content}], add_generation_prompt=True, return_dict=True
    )
    assert call.prompt_ids == rendered["input_ids"]
    assert len(call.sampled_ids) == len(call.logprobs) == run.calls[0].usage["output_tokens"]
    assert call.version == 0
    attach_tokens([run], client)
    save_runs(tmp_path / "runs.jsonl", [run])
    assert load_runs(tmp_path / "runs.jsonl") == [run]
    assert run.calls[0].tokens == call
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.tensor([call.prompt_ids + call.sampled_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    first = len(call.prompt_ids)
    expected = [float(logprobs[first + n - 1, token]) for n, token in enumerate(call.sampled_ids)]
    assert call.logprobs == pytest.approx(expected, abs=1e-3)


async def test_every_way_of_calling_is_recorded(server: EmbeddedServer, client: Client, policy: str) -> None:
    llm = chat(server, policy, max_tokens=5)
    with record() as run:
        await asyncio.to_thread(llm.invoke, PROMPT)
        await llm.ainvoke(PROMPT)
        for _ in llm.stream(PROMPT):
            pass
        async for _ in llm.astream(PROMPT):
            pass
        await llm.abatch([PROMPT, PROMPT])
    calls = {call.call_id: call for call in client.calls(run.run_id)}
    assert len(run.calls) == 6
    for made in run.calls:
        found = calls.pop(made.call_id)
        assert found.status == "complete"
        assert found.untrainable is None
        assert len(found.sampled_ids) == len(found.logprobs) == made.usage["output_tokens"]
        assert made.version == f"{policy}@0"
    assert calls == {}


def test_a_second_event_loop_works(server: EmbeddedServer, policy: str) -> None:
    llm = chat(server, policy, max_tokens=2)
    for _ in range(3):
        assert asyncio.run(llm.ainvoke(PROMPT)).usage_metadata is not None


def test_an_abandoned_stream_is_kept_and_ends_the_engines_work(
    server: EmbeddedServer, client: Client, policy: str
) -> None:
    with record() as run:
        stream = chat(server, policy, max_tokens=200).stream(PROMPT)
        for _ in range(3):
            next(stream)
        stream.close()
    for _ in range(50):
        found = client.calls(run.run_id)
        if found:
            break
        asyncio.run(asyncio.sleep(0.1))
    (call,) = found
    assert (call.status, call.untrainable) == ("abandoned", "abandoned")
    assert 0 < len(call.sampled_ids) < 200
    assert run.calls[0].delivered is False


def test_any_openai_client_can_talk_to_the_gateway(server: EmbeddedServer, policy: str) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    assert {policy, f"{policy}@0", "tiny"} <= {model.id for model in sdk.models.list()}
    answer = sdk.chat.completions.create(
        model=policy, messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=True
    )
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == 3
    chunks = list(
        sdk.chat.completions.create(
            model=f"{policy}@0", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
        )
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all("token_ids" not in (chunk.choices[0].model_extra or {}) for chunk in chunks)


def test_wrong_names_and_long_prompts_say_what_to_do(server: EmbeddedServer, policy: str) -> None:
    with pytest.raises(openai.NotFoundError, match=f"'nobody' does not exist.*{policy}"):
        chat(server, "nobody").invoke(PROMPT)
    with pytest.raises(openai.NotFoundError, match="has no version 9"):
        chat(server, f"{policy}@9").invoke(PROMPT)
    with record() as run, pytest.raises(openai.BadRequestError, match=r"node 'say'.*\d{3,} tokens.*holds 256"):
        one_node(server.url, policy).invoke({"text": "parcel " * 400})
    assert run.error is not None or run.calls[0].error is not None


def test_a_call_without_a_limit_is_answered(server: EmbeddedServer, client: Client, policy: str) -> None:
    with record() as run:
        chat(server, policy).invoke(PROMPT)
    (call,) = client.calls(run.run_id)
    assert len(call.prompt_ids) + len(call.sampled_ids) <= 256


def test_errors_come_in_openais_form(server: EmbeddedServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        for method, path, body in (
            ("POST", "/v1/chat/completions", b"not json"),
            ("POST", "/v1/chat/completions", b"{}"),
            ("POST", "/api/submissions", b"{}"),
            ("POST", "/api/policies", b'{"name": "a@b"}'),
            ("POST", "/api/policies", b'{"name": "big", "lora": {"rank": 64}}'),
            ("GET", "/api/policies/nobody", b""),
            ("GET", "/nowhere", b""),
        ):
            answer = http.request(method, path, content=body, headers={"content-type": "application/json"})
            assert 400 <= answer.status_code < 500, path
            assert {"message", "type", "code", "param"} == set(answer.json()["error"]), path


def test_processed_logprobs_follow_the_temperature(
    server: EmbeddedServer, client: Client, policy: str, tiny_model: Path
) -> None:
    with record(sampling={"temperature": 0.5}) as run:
        chat(server, policy, max_tokens=1).invoke(PROMPT)
    (call,) = client.calls(run.run_id)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([call.prompt_ids])).logits[0, -1]
    expected = float((logits / 0.5).log_softmax(-1)[call.sampled_ids[0]])
    assert math.isclose(call.logprobs[0], expected, abs_tol=1e-3)
    assert call.sampling["temperature"] == 0.5
