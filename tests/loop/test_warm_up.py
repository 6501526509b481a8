"""What supervised fine-tuning is sent: made of runs, calls of any model, conversations; and the client's two forms."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatResult

from langgraph_art import AsyncClient, Client, SftConfig, load_examples
from langgraph_art.errors import ArtError, NothingToTrain, TrainingFailed
from langgraph_art.protocol import ChatExample, Job, RecordedExample
from langgraph_art.recording import record
from langgraph_art.runs import GraphRun, NodeCall, RunGroup, save_runs
from langgraph_art.warm_up import make_sft

from .conftest import build
from .stub_server import StubServer
from .test_cli import run as run_cli

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object"}},
}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def node_call(call_id: str, messages: list[BaseMessage], response: AIMessage | None, **fields: Any) -> NodeCall:
    values: dict[str, Any] = {"node": "clerk", "model": "gpt", "delivered": True, "started_at": datetime.now(UTC)}
    return NodeCall(
        call_id=call_id,
        messages=[message.model_dump() for message in messages],
        response=None if response is None else response.model_dump(),
        **(values | fields),
    )


def test_calls_that_the_server_recorded_are_sent_by_id_only(stub: StubServer) -> None:
    with record() as run:
        build().invoke({"text": "secret text"})
    sent, left_out = make_sft("desk", [run])
    assert sent.examples == [RecordedExample(call_id=run.calls[0].call_id, run_id=run.run_id)]
    assert "secret text" not in sent.model_dump_json()
    assert left_out == {}


def test_calls_of_other_models_are_sent_in_openai_s_form() -> None:
    asked = AIMessage("", tool_calls=[{"id": "1", "name": "look_up", "args": {"city": "Lima"}}])
    history = [SystemMessage("Be brief."), HumanMessage("Where?"), asked, ToolMessage("found", tool_call_id="1")]
    answer = AIMessage("Lima", additional_kwargs={"reasoning_content": "It is in Peru."})
    call = node_call("c", history, answer, tools=[TOOL])
    (example,) = make_sft("desk", [call])[0].examples
    assert isinstance(example, ChatExample)
    assert example.tools == [TOOL]
    assert [message["role"] for message in example.messages] == ["system", "user", "assistant", "tool", "assistant"]
    before, after = example.messages[2], example.messages[4]
    (tool_call,) = before["tool_calls"]
    assert (tool_call["function"]["name"], json.loads(tool_call["function"]["arguments"])) == (
        "look_up",
        {"city": "Lima"},
    )
    assert before["weight"] == 0, "what the model was given is not learned"
    assert (after["content"], after["reasoning"]) == ("Lima", "It is in Peru.")
    assert "weight" not in after


def test_tools_of_another_provider_are_put_into_openai_s_form() -> None:
    anthropic = {"name": "look_up", "description": "Looks up.", "input_schema": {"type": "object", "properties": {}}}
    call = node_call("c", [HumanMessage("Where?")], AIMessage("Lima"), tools=[anthropic])
    (example,) = make_sft("desk", [call])[0].examples
    assert isinstance(example, ChatExample)
    assert example.tools is not None
    assert example.tools[0]["function"]["name"] == "look_up"


class WithTools(GenericFakeChatModel):
    """A chat model that says, as providers' models do, which tools it was offered."""

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        kwargs.pop("tools", None)
        return super()._generate(*args, **kwargs)


def test_a_recording_of_another_model_is_an_example_with_its_tools(tmp_path: Path) -> None:
    llm = WithTools(messages=iter([AIMessage("Lima")]))
    with record() as run:
        llm.invoke("Where?", tools=[TOOL])
    save_runs(tmp_path / "runs.jsonl", [run])
    (loaded,) = load_examples(tmp_path / "runs.jsonl")
    assert isinstance(loaded, GraphRun)
    (example,) = make_sft("desk", loaded.calls)[0].examples
    assert isinstance(example, ChatExample)
    assert example.messages == [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Lima"}]
    assert example.tools == [TOOL]


def test_which_calls_of_a_run() -> None:
    question, answer = [HumanMessage("q")], AIMessage("a")
    calls = [
        node_call("ours", question, answer, model="desk", art=True),
        node_call("pinned", question, answer, model="desk@3", art=True, node="planner|model"),
        node_call("another", question, answer, model="clerk", art=True),
        node_call("gpt", question, answer, node="planner|model"),
        node_call("lost", question, None, model="desk", art=True, delivered=False),
        node_call("silent", question, None, node="planner"),
    ]
    run = GraphRun(run_id="r", calls=calls)

    def chosen(*examples: Any, **options: Any) -> tuple[list[str], dict[str, int]]:
        sent, left_out = make_sft("desk", examples, **options)
        return [e.call_id if isinstance(e, RecordedExample) else "chat" for e in sent.examples], left_out

    assert chosen(run) == (["ours", "pinned"], {"call:not_delivered": 1})
    assert chosen(RunGroup(group_id="g", runs=[run, run])) == (["ours", "pinned"] * 2, {"call:not_delivered": 2})
    assert chosen(run, nodes=["planner"]) == (["pinned", "chat"], {"call:no_answer": 1})
    assert chosen(run, nodes=["planner", "model"]) == (["pinned", "chat"], {"call:no_answer": 1}), "each once"
    with pytest.raises(NothingToTrain, match=r"asked for clerk, desk, desk@3, gpt: name nodes="):
        make_sft("boss", [run])
    with pytest.raises(NothingToTrain, match="There is no example for policy 'desk'"):
        make_sft("desk", [])


def test_the_same_examples_have_the_same_key() -> None:
    keys = {
        make_sft("desk", [CHAT])[0].idempotency_key,
        make_sft("desk", [dict(CHAT)])[0].idempotency_key,
        make_sft("desk", [CHAT], config=SftConfig())[0].idempotency_key,
    }
    assert len(keys) == 1
    others = [
        make_sft("clerk", [CHAT])[0],
        make_sft("desk", [CHAT, CHAT])[0],
        make_sft("desk", [CHAT], config=SftConfig(epochs=2))[0],
        make_sft("desk", [CHAT], idempotency_key="mine")[0],
    ]
    assert len(keys | {other.idempotency_key for other in others}) == 5


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "Example 2 cannot be learned.*no message to learn"),
        ({"messages": []}, "Example 2 cannot be learned: messages: "),
        ({"prompt": "hi"}, "Example 2 cannot be learned: messages: .*prompt: "),
        (7, "Example 2 cannot be learned"),
    ],
)
def test_what_is_no_example_is_refused_by_number(example: Any, message: str) -> None:
    with pytest.raises(ArtError, match=message):
        make_sft("desk", [CHAT, example])


def test_files(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps(CHAT | {"tools": tools}) for tools in (None, [TOOL])) + "\n\n")
    assert load_examples(chats) == [CHAT | {"tools": None}, CHAT | {"tools": [TOOL]}]
    runs = tmp_path / "runs.jsonl"
    save_runs(runs, [GraphRun(run_id=str(reward), reward=reward) for reward in (0.2, 0.9, None, 1.0)])
    loaded = load_examples(runs, min_reward=0.9)
    assert [example.run_id for example in loaded if isinstance(example, GraphRun)] == ["0.9", "1.0"]
    assert len(load_examples(runs)) == 4
    with pytest.raises(ArtError, match=r"chats.jsonl has no runs, so no rewards"):
        load_examples(chats, min_reward=0.9)
    for text, message in (("{", "line 2: not valid JSON"), ('{"x": 1}', "line 2: neither a graph run nor")):
        (tmp_path / "bad.jsonl").write_text(json.dumps(CHAT) + "\n" + text)
        with pytest.raises(ArtError, match=message):
            load_examples(tmp_path / "bad.jsonl")
    with pytest.raises(ArtError, match="There is no file"):
        load_examples(tmp_path / "none.jsonl")


async def test_the_client_waits_until_the_new_version_serves(stub: StubServer) -> None:
    seen: list[Job] = []
    with Client() as client:
        client.policies.create("desk")
        result = client.sft("desk", [CHAT], config=SftConfig(epochs=2), on_progress=lambda job: seen.append(job))
    assert [update.version for update in result.updates] == [1]
    assert (seen[0].kind, seen[-1].total) == ("sft", 3)
    (sent,) = stub.submissions.values()
    assert sent.config == SftConfig(epochs=2)
    async with AsyncClient() as asynchronous:
        assert await asynchronous.sft("desk", [CHAT], config=SftConfig(epochs=2)) == result
        assert len(stub.jobs) == 1, "the same examples are the same job"
        stub.fail = "the disk is full"
        with pytest.raises(TrainingFailed, match=r"(?s)the disk is full.*client.sft again with the same examples"):
            await asynchronous.sft("desk", [CHAT])


def test_the_command(stub: StubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with Client() as client:
        client.policies.create("desk")
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CHAT))
    code, output, _ = run_cli(capsys, "sft", "desk", str(path), "--epochs", "3", "--learning-rate", "0.01")
    assert code == 0
    assert "desk@1: 1 answers, 1 tokens, 2 steps, loss 1.500 → 0.500 per token" in output.replace("\n", " ")
    assert "left out: 1 group:no_signal" in output
    (sent,) = stub.submissions.values()
    assert sent.config == SftConfig(epochs=3, learning_rate=0.01)
    code, _, error = run_cli(capsys, "sft", "desk", str(path), "--min-reward", "1")
    assert (code, error.count("\n")) == (1, 1)
    code, _, error = run_cli(capsys, "sft", "desk", str(path), "--epochs", "0")
    assert (code, error) == (1, "error: --epochs: Input should be greater than or equal to 1\n")
