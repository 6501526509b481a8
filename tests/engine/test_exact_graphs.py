"""Random programs on the real engine: what is recorded is what the engine told the graph that it sampled."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from langgraph_art import ChatART, Client, EmbeddedServer, GraphRun, record

from ..random_graphs import App, programs

pytestmark = pytest.mark.engine


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=programs(), is_async=st.booleans(), stream=st.booleans())
def test_random_programs(
    server: EmbeddedServer,
    client: Client,
    policy: str,
    tiny_model: Path,
    steps: list[Any],
    is_async: bool,
    stream: bool,
) -> None:
    # The engine's own ids and logprobs come back to the graph in the answer, past everything that records.
    model = ChatART(
        model=policy,
        base_url=f"{server.url}/v1",
        max_tokens=4,
        logprobs=True,
        extra_body={"return_tokens_as_token_ids": True},
    )
    app = App(model, is_async)
    graph = app.build(steps)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    async def one(name: str) -> GraphRun:
        asked: Any = {"run": name, "log": []}
        with record(metadata={"name": name}) as run:
            if stream and is_async:
                [part async for part in graph.astream(asked, stream_mode="messages", subgraphs=True)]
            elif is_async:
                await graph.ainvoke(asked)
            else:
                await asyncio.to_thread(graph.invoke, asked)
        return run

    async def both() -> list[GraphRun]:
        return list(await asyncio.gather(one("first"), one("second")))

    for run in asyncio.run(both()):
        name = run.metadata["name"]
        asked = {prompt: count for prompt, count in app.asked.items() if prompt.endswith(f" of {name}")}
        recorded = {call.call_id: call for call in client.calls(run.run_id)}
        assert Counter(call.messages[0]["content"] for call in run.calls) == asked
        assert recorded.keys() == {call.call_id for call in run.calls}
        for call in run.calls:
            kept, prompt = recorded[call.call_id], f"{call.node} of {name}"
            assert call.messages[0]["content"] == prompt
            assert (kept.node, kept.run_id, kept.status) == (call.node, run.run_id, "complete")
            assert kept.untrainable is None
            assert call.response is not None
            told = call.response["response_metadata"]["logprobs"]["content"]
            assert [f"token_id:{token}" for token in kept.sampled_ids] == [part["token"] for part in told]
            assert kept.logprobs == pytest.approx([part["logprob"] for part in told], abs=1e-6)
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
            )
            assert kept.prompt_ids == rendered["input_ids"]
            assert call.usage is not None
            assert call.usage["input_tokens"] == len(kept.prompt_ids)
            assert call.usage["output_tokens"] == len(kept.sampled_ids)
            assert call.version == f"{policy}@0"
