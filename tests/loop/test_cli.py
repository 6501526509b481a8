"""The command as a user runs it: help everywhere, one clear line for errors, real output for real input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from langgraph_art.cli.main import app
from langgraph_art.rollouts import rollout
from langgraph_art.runs import GraphRun, save_runs

from .conftest import build
from .stub_server import StubServer


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
        ["policies", "list"],
        ["policies", "create"],
        ["policies", "show"],
        ["runs", "list"],
        ["runs", "show"],
    ],
)
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, output, _ = run(capsys, *command, "--help")
    assert code == 0
    assert f"Example: langgraph-art {' '.join(command)}" in output


def test_policies(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "policies", "create", "desk", "--rank", "8")
    assert (code, stub.policies["desk"].lora.rank) == (0, 8)
    assert "desk (rank 8, alpha 32)" in output
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

    options = set(inspect.signature(serve).parameters) - {"arguments", "policy"} | {
        "engine_args",
        "policies",
        "api_key",
    }
    assert options == set(config.ServerSettings.model_fields), "the API key comes from the environment only"


def test_serve_refuses_bad_values(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("langgraph_art_server.main")
    code, _, error = run(capsys, "serve", "--dtype", "float8", "--port", "70000")
    assert (code, error.count("\n")) == (1, 1)
    assert "--dtype: Input should be 'auto'" in error
    assert "--port: " in error
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
