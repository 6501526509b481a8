"""The trainer's process: JSON lines in on stdin, JSON lines out on stdout, one task at a time.

Invariant: stdout carries messages only (whatever libraries print goes to stderr), a bad task is answered by ``Failed``
and never ends the process, and the process never outlives its parent: the end of stdin ends it at once, even in the
middle of a computation.

The parent decides how idle threads wait: set ``OMP_WAIT_POLICY=PASSIVE`` (libgomp) or ``KMP_BLOCKTIME=0`` (libiomp5)
in the environment, or OpenMP threads spin for a while after every parallel region.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TextIO


def main(arguments: list[str] | None = None) -> None:
    """Runs the worker until stdin ends.

    Args:
        arguments: Command line without the program's name; ``None`` means the process's own.
    """
    parser = argparse.ArgumentParser(prog="langgraph_art_server.training.worker", description="Trains LoRA adapters.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the base model")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, help="threads to compute with; default: what PyTorch chooses")
    parser.add_argument("--token-budget", type=int, help="tokens per forward pass; default: what fits into memory")
    parser.add_argument("--quantization", choices=["4bit", "8bit"], help="pack the base model with bitsandbytes")
    options = parser.parse_args(arguments)

    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    try:
        _serve(options, lines, messages)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # not sys.exit: the interpreter would abort over the lock on stdin, which the reader holds


def _read(lines: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)  # not sys.exit: the main thread may be deep in a computation


def _serve(options: argparse.Namespace, lines: queue.SimpleQueue[bytes], messages: TextIO) -> None:
    # Imported here, when stdout is out of their reach.
    import torch

    from langgraph_art.protocol import Message
    from langgraph_art_server.training.memory import free_memory, plan_passes, release_memory
    from langgraph_art_server.training.model import PolicyModel
    from langgraph_art_server.training.sft import run_sft
    from langgraph_art_server.training.step import run_task
    from langgraph_art_server.training.task import TASK, Failed, Progress, Ready, SftTask

    def send(message: Message) -> None:
        print(message.model_dump_json(), file=messages, flush=True)

    if options.threads:
        torch.set_num_threads(options.threads)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = PolicyModel.load(options.model, device, options.quantization)
    budget, checkpointing = plan_passes(model, free_memory(model.device), options.token_budget)
    send(
        Ready(
            device=device,
            parameters=model.base_parameters,
            token_budget=budget,
            checkpointing=checkpointing,
        )
    )
    while True:
        line = lines.get()
        task_id = ""
        try:
            content = json.loads(line)
            task_id = str(content.get("task_id", "")) if isinstance(content, dict) else ""
            task = TASK.validate_python(content)

            def report(done: int, total: int, task_id: str = task_id) -> None:
                send(Progress(task_id=task_id, done=done, total=total))

            tokens = budget if task.token_budget is None else task.token_budget
            again = checkpointing if task.checkpointing is None else task.checkpointing
            if isinstance(task, SftTask):
                send(run_sft(model, task, token_budget=tokens, checkpointing=again, on_progress=report))
            else:
                send(run_task(model, task, token_budget=tokens, checkpointing=again, on_progress=report))
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            retry = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            send(Failed(task_id=task_id, error=message, traceback=traceback.format_exc(), retry=retry))
        release_memory(model.device)


if __name__ == "__main__":
    main()
