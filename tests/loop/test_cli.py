"""The command as a user runs it: help everywhere, one clear line for errors, real output for real input."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from langgraph_art import Client
from langgraph_art.cli.main import app
from langgraph_art.rollouts import rollout
from langgraph_art.runs import GraphRun, NodeCall, RunError, RunInterrupt, load_runs, save_runs

from .conftest import build
from .stub_server import StubServer

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and error."""
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def saved(stub: StubServer, tmp_path: Path) -> Path:
    turn = iter(["hello [bold]you[/bold]", "!overflow"])
    graph = build(before=lambda state: next(turn))
    (group,) = rollout(graph, [{"text": "x"}], n=2, concurrency=1, reward=lambda run: {"quality": 0.5}, progress=False)
    save_runs(tmp_path / "runs.jsonl", group.runs)
    return tmp_path / "runs.jsonl"


def test_module_and_version() -> None:
    command = [sys.executable, "-m", "langgraph_art", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("langgraph-art ")


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["doctor"],
        ["sft"],
        ["policies", "list"],
        ["policies", "create"],
        ["policies", "show"],
        ["runs", "list"],
        ["runs", "show"],
        ["runs", "delete"],
    ],
)
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, output, _ = run(capsys, *command, "--help")
    assert code == 0
    assert f"Example: langgraph-art {' '.join(command)}" in output


def test_policies(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "policies", "create", "desk", "--rank", "8")
    assert (code, stub.policies["desk"].lora.rank) == (0, 8)
    assert "desk (rank 8, alpha 32, layers: all)" in output
    code, output, _ = run(capsys, "policies", "create", "narrow", "--target", "v_proj", "--target", "q_proj")
    assert (code, stub.policies["narrow"].lora.targets) == (0, ["q_proj", "v_proj"])
    assert "layers: q_proj, v_proj" in output
    code, output, _ = run(capsys, "policies", "list", "--url", stub.url)
    assert code == 0
    assert "desk@0" in output
    code, output, _ = run(capsys, "policies", "show", "desk")
    assert "desk@0 (serves)" in output


def test_runs_list(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "runs", "list", str(saved))
    assert code == 0
    assert output.count("desk@7") == 1, "the failed run has no version"
    assert "context holds 2048" in output.replace("\n", " ")
    assert "2 runs, reward 0.500 ± 0.000 over 2" in output


def test_runs_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "runs", "list", str(saved))
    run_id = next(line.split()[1] for line in output.splitlines() if "desk@7" in line)
    code, output, _ = run(capsys, "runs", "show", str(saved), run_id[:13])
    assert code == 0
    for part in (
        run_id,
        "0.500 (quality 0.500)",
        "clerk",
        "human: hello [bold]you[/bold]",
        "ai: re: hello",
        '"text": "x"',
    ):
        assert part in output
    code, _, error = run(capsys, "runs", "show", str(saved), "")
    assert code == 1
    assert error.startswith("error: 2 runs in ")


def test_runs_as_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "runs", "list", str(saved), "--json")
    assert code == 0
    good, bad = sorted(json.loads(output), key=lambda row: row["error"] is not None)
    assert (good["versions"], good["reward"], good["calls"], good["error"]) == (["desk@7"], 0.5, 1, None)
    assert "context holds 2048" in bad["error"]
    code, output, _ = run(capsys, "runs", "show", str(saved), good["run_id"], "--json")
    assert code == 0
    record = json.loads(output)
    assert record in [json.loads(line) for line in saved.read_text().splitlines()], "the file's own format"


def a_call(node: str, messages: list[dict[str, Any]], response: dict[str, Any] | None, **fields: Any) -> NodeCall:
    return NodeCall(
        call_id=f"c{len(messages)}", node=node, model="desk", messages=messages, response=response, started_at=NOW,
        ended_at=NOW, art=True, delivered=response is not None, **fields,
    )  # fmt: skip


def test_a_run_is_a_tree_of_nodes_calls_and_what_happened_in_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    question, plan, more = HumanMessage("where?"), AIMessage("look it up"), HumanMessage("in Africa")
    bad_call = {"name": "search", "args": "[1]", "id": "t", "error": "no object", "type": "invalid_tool_call"}
    look = AIMessage("", tool_calls=[{"name": "look", "args": {"q": "[red]Nile[/red]"}, "id": "t"}])
    look.invalid_tool_calls.append(bad_call)
    first, *rest = (message.model_dump() for message in (question, plan, more, look))
    error = RunError(type="ValueError", message="no [/] map", node="planner|tools", infrastructure=False)
    shown = GraphRun(
        run_id="r1", started_at=NOW, ended_at=NOW, reward=0.25, node_rewards={"planner": 0.75}, error=error,
        calls=[
            a_call("planner|model", [first], rest[0], version="desk@3", usage={"input_tokens": 9, "output_tokens": 4}),
            a_call("planner|tools", [first, rest[0]], None, error=error),
            a_call("planner|model", [first, rest[0], rest[1]], rest[2]),
        ],
        interrupts=[
            RunInterrupt(id="i", node="planner|ask", value={"q": "go on?"}, at=NOW, answered=True, answer="yes"),
            RunInterrupt(id="j", node="planner|ask", value="sure?", at=NOW),
        ],
    )  # fmt: skip
    save_runs(tmp_path / "runs.jsonl", [shown])
    code, output, _ = run(capsys, "runs", "show", str(tmp_path / "runs.jsonl"), "r1")
    assert code == 0
    lines = [line.strip("│├└─ \t") for line in output[output.index("calls by node") :].splitlines()]
    assert [line for line in lines if line] == [
        "calls by node",
        "planner  reward 0.750",
        "model",
        "call 1 · desk@3 · 9 + 4 tokens",
        "human: where?",
        "ai: look it up",
        "call 3 · desk · ? + ? tokens",
        "2 messages shown above",
        "human: in Africa",
        "ai:",
        '→ look({"q": "[red]Nile[/red]"})',
        "→ search([1]), which is invalid",
        "tools",
        "call 2 · desk · ? + ? tokens · not delivered",
        "2 messages shown above",
        "ValueError in planner|tools: no [/] map",
        "ask",
        'interrupt: {"q": "go on?"} · answered yes',
        "interrupt: sure? · not answered",
        "output  null",
    ]
    save_runs(tmp_path / "runs.jsonl", [shown.model_copy(update={"reward": 0.5})], append=True)
    code, output, _ = run(capsys, "runs", "list", str(tmp_path / "runs.jsonl"))
    assert (code, "no [/] map" in output) == (0, True)
    assert "1 runs, reward 0.500" in output, "a run that was resumed counts as it was last"


def test_a_run_is_deleted_on_the_server_and_in_files(
    stub: StubServer, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep, gone = (loaded.run_id for loaded in load_runs(saved))
    other = tmp_path / "other.jsonl"
    other.write_bytes(saved.read_bytes())
    stub.in_use.add(gone)
    files = ["--file", str(saved), "--file", str(other)]
    code, _, error = run(capsys, "runs", "delete", gone, *files)
    assert (code, "which is queued" in error) == (1, True)
    assert saved.read_bytes() == other.read_bytes(), "nothing is deleted before the server agrees"
    assert len(load_runs(saved)) == 2
    stub.in_use.clear()
    with Client(stub.url) as client:
        client.policies.create("desk")
    code, output, _ = run(capsys, "runs", "delete", gone, *files)
    assert code == 0
    assert "server: 3 recorded calls, 1 pins" in output
    assert f"{other}: 1 runs deleted" in output.replace("\n", "")
    assert "still in the weights of desk@0" in output
    assert [loaded.run_id for path in (saved, other) for loaded in load_runs(path)] == [keep, keep]
    code, _, error = run(capsys, "runs", "delete", gone, "--file", str(tmp_path / "none"))
    assert (code, error) == (1, f"error: There is no file {tmp_path / 'none'}.\n")


def test_messages_in_a_state_are_shown_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = {"messages": [HumanMessage("hi"), AIMessage("hello")], ("a", 1): {1, 2}}
    save_runs(tmp_path / "runs.jsonl", [GraphRun(run_id="r", output=output)])
    code, shown, _ = run(capsys, "runs", "show", str(tmp_path / "runs.jsonl"), "r")
    assert code == 0
    assert '["human: hi", "ai: hello"]' in shown


def test_errors_are_one_line(stub: StubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, error = run(capsys, "runs", "list", str(tmp_path / "none.jsonl"))
    assert (code, error) == (1, f"error: There is no file {tmp_path / 'none.jsonl'}.\n")
    (tmp_path / "bad.jsonl").write_text("not json\n")
    code, _, error = run(capsys, "runs", "list", str(tmp_path / "bad.jsonl"))
    assert (code, error.count("\n")) == (1, 1)
    assert "bad.jsonl, line 1" in error
    code, _, error = run(capsys, "policies", "show", "nobody")
    assert (code, error.count("\n")) == (1, 1)
    assert "no policy nobody" in error
    stub.stop()
    code, _, error = run(capsys, "policies", "list")
    assert (code, error.count("\n")) == (1, 1)
    assert "langgraph-art serve" in error


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "langgraph_art", "--debug", "runs", "list", str(tmp_path / "none")]
    assert "Traceback" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_serve_maps_flags_to_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main = pytest.importorskip("langgraph_art_server.main")
    given = []
    monkeypatch.setattr(main, "serve", given.append)
    flags = "--model m --policy a --policy b --port 0 --dtype float32 --max-model-len 512 --max-lora-rank 8"
    arguments = ["serve", *flags.split(), "--data-dir", "d", "--", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", ["langgraph-art", *arguments])
    monkeypatch.setenv("LANGGRAPH_ART_SERVER_TOOL_PARSER", "hermes")
    run(capsys, *arguments)
    (settings,) = given
    assert (settings.model, settings.policies, settings.port, settings.dtype) == ("m", ["a", "b"], 0, "float32")
    assert (settings.max_model_len, settings.max_lora_rank, settings.data_dir) == (512, 8, Path("d"))
    assert (settings.engine_args, settings.tool_parser) == (["--seed", "1"], "hermes")


def test_serve_offers_every_setting() -> None:
    config = pytest.importorskip("langgraph_art_server.config")
    import inspect

    from langgraph_art.cli.serve import serve

    options = set(inspect.signature(serve).parameters) - {"arguments", "policy", "teacher"} | {
        "engine_args",
        "policies",
        "teachers",
        "api_key",
        "teacher_api_keys",
        "engine_api_key",
    }
    assert options == set(config.ServerSettings.model_fields), "keys come from the environment only"


def test_serve_refuses_bad_values(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("langgraph_art_server.main")
    code, _, error = run(capsys, "serve", "--dtype", "float8", "--port", "70000")
    assert (code, error.count("\n")) == (1, 1)
    assert "--dtype: Input should be 'auto'" in error
    assert "--port: " in error
    code, _, error = run(capsys, "serve", "--policy", "good", "--policy", "a b")
    assert (code, error.count("\n")) == (1, 1)
    assert "--policy 'a b': String should match" in error
    monkeypatch.setattr(sys, "argv", ["langgraph-art", "serve", "Qwen/Qwen3-0.6B"])
    code, _, error = run(capsys, "serve", "Qwen/Qwen3-0.6B")
    assert (code, error.count("\n")) == (1, 1)
    assert "--model" in error


def test_serve_without_the_server_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langgraph_art.cli.serve.importlib.util.find_spec", lambda name: None)
    code, _, error = run(capsys, "serve")
    assert code == 1
    assert "pip install 'langgraph-art[server-cuda]'" in error
    assert "langgraph-art[server-cpu]" in error
