"""Loss and backward pass of one update: the token tree, rows with the same layers, and TRL, on the same tokens.

    python benchmarks/trainer.py [--repeats 3] [--workload W1] [--checkpointing on] [--only tree,trl] [--results FILE]

SmolLM2-135M, float32, LoRA of rank 16 on all linear layers. Each measurement runs in a process of its own, so that its
peak memory is its own; repetitions alternate between the methods. With ``--results`` measurements are kept in a file
and not made again, so that an interrupted benchmark goes on where it was.

    W1    8 runs of one call: 512 common prompt tokens, 64 sampled
    W2    4 runs of 6 calls: 256 common prompt tokens, each call samples 48 and 64 tokens of context follow

``tree`` is the trainer as it is. ``rows`` runs the same layers on one row per call, batched by equal length, so nothing
is padded. ``trl`` is GRPOTrainer's loss on one row per call, padded as TRL pads; ``trl_one_row`` is the layout that TRL
uses for tools, one row per run, which exists only where histories grow by appending. All four make the same gradient,
which is checked.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe

MODEL = "smollm2-135m-instruct"
RANK = 16
TOLERANCE = 1e-3
"""Largest relative difference (Euclidean) between two methods' gradients in float32."""
ROWS_PER_PASS = {True: 8, False: 4}
"""Rows of a TRL micro-batch, with checkpointing its default ``per_device_train_batch_size``. Without it, half of that:
eight rows of the second workload need more than 20 GB."""
Update = Callable[[list["Call"]], float]
"""Does the forward and backward pass of one update on these calls and returns the loss."""
METHODS = {"W1": ("tree", "rows", "trl"), "W2": ("tree", "rows", "trl", "trl_one_row")}


@dataclass(frozen=True)
class Call:
    """One call: its own row of tokens, the last of which are sampled."""

    run: int
    prompt: list[int]
    sampled: list[int]


def workload(name: str) -> list[Call]:
    """The calls of a workload: random tokens, always the same, shared exactly as far as the histories are."""
    tokens = random.Random(0)

    def draw(count: int) -> list[int]:
        return [tokens.randrange(100, 49_000) for _ in range(count)]

    if name == "W1":
        prompt = draw(512)
        return [Call(run, prompt, draw(64)) for run in range(8)]
    prompt, calls = draw(256), []
    for run in range(4):
        history = prompt
        for _ in range(6):
            calls.append(Call(run, history, draw(48)))
            history = history + calls[-1].sampled + draw(64)
    return calls


def rewards(calls: list[Call]) -> list[float]:
    """A reward for each run; none is the mean of all."""
    runs = 1 + max(call.run for call in calls)
    return [run / runs + 0.1 * (-1) ** run for run in range(runs)]


def advantages(calls: list[Call]) -> list[float]:
    """The rewards without their mean."""
    values = rewards(calls)
    return [value - statistics.fmean(values) for value in values]


# -- what the shapes allow --------------------------------------------------------------------------------------------


def ideal_flop_saving(calls: list[Call], model: dict[str, Any], *, checkpointing: bool) -> float:
    """Multiplications of rows over those of the tree: linear layers, head at trained positions, visible pairs.

    Weights are frozen, so a layer costs one product forward and one backward (for its input); an adapter costs one
    forward and two backward; a pair costs two products of the head's size forward and four backward. Checkpointing
    does the forward part of the layers twice.
    """
    hidden, inner, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    width = hidden // model["num_attention_heads"]
    keys = width * model["num_key_value_heads"]
    shapes = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    again = 1 if checkpointing else 0
    base, adapter = sum(i * o for i, o in shapes), sum(RANK * (i + o) for i, o in shapes)
    per_token = layers * ((2 + again) * base + (3 + again) * adapter)
    per_pair = layers * (6 + 2 * again) * hidden
    per_row = 2 * hidden * model["vocab_size"]

    def cost(tokens: int, rows: int, pairs: int) -> int:
        return tokens * per_token + rows * per_row + pairs * per_pair

    # The last sampled token predicts nothing: no method computes it for its own call.
    paths = [tuple(call.prompt + call.sampled[:-1]) for call in calls]
    nodes = {path[: depth + 1] for path in paths for depth in range(len(path))}
    trained = {
        (*call.prompt, *call.sampled[:position]) for call in calls for position in range(len(call.sampled))
    }  # each the context of one distribution
    separate = cost(
        sum(len(path) for path in paths),
        sum(len(call.sampled) for call in calls),
        sum(len(path) * (len(path) + 1) // 2 for path in paths),
    )
    return separate / cost(len(nodes), len(trained), sum(len(node) for node in nodes))


# -- methods: each loads the model and returns how it does an update, and the adapter's weights -----------------------


def policy_model(directory: Path, checkpointing: bool) -> Any:
    """The trainer's model with a random adapter, whose B is not zero so that A has a gradient too."""
    from langgraph_art.protocol import LoraConfig
    from langgraph_art_server.training.model import PolicyModel

    model = PolicyModel.load(directory, "cpu")
    lora = LoraConfig(rank=RANK, alpha=2 * RANK)
    model.set_adapter(lora, None)
    model.set_adapter(lora, adapter({name: tuple(p.shape) for name, p in model.parameters.items()}))
    model.checkpointing = checkpointing
    return model


def adapter(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Random adapter weights, the same for every method."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in sorted(shapes.items())}


def tree(directory: Path, checkpointing: bool) -> tuple[Update, dict[str, Any]]:
    """The trainer: plan, packs, passes."""
    from langgraph_art.protocol import LoraConfig, TrainConfig
    from langgraph_art_server.training.objective import reinforcement
    from langgraph_art_server.training.passes import accumulate_gradients
    from langgraph_art_server.training.plan import plan_update
    from langgraph_art_server.training.task import PolicyTask, TaskCall, TaskGroup, TaskRun

    model = policy_model(directory, checkpointing)
    config = TrainConfig(scale="none")

    def update(calls: list[Call]) -> float:
        runs = [
            TaskRun(
                run_id=str(run),
                reward=reward,
                calls=[
                    TaskCall(
                        call_id=f"{run}-{index}",
                        node="agent",
                        prompt_ids=call.prompt,
                        sampled_ids=call.sampled,
                        logprobs=[-1.0] * len(call.sampled),
                        temperature=1.0,
                        version=0,
                    )
                    for index, call in enumerate(calls)
                    if call.run == run
                ],
            )
            for run, reward in enumerate(rewards(calls))
        ]
        task = PolicyTask(
            policy="p",
            lora=LoraConfig(rank=RANK, alpha=2 * RANK),
            parent=0,
            parent_dir=None,
            version=1,
            out_dir="unused",
            groups=[TaskGroup(group_id="g", runs=runs)],
        )
        plan = plan_update(task, config, vocabulary=model.vocabulary, token_budget=4096)
        loss, _ = accumulate_gradients(
            model, plan.packs, lambda sampled, entries: reinforcement(sampled, entries, config), lambda: None
        )
        return loss

    return update, model.parameters


def rows(directory: Path, checkpointing: bool) -> tuple[Update, dict[str, Any]]:
    """The trainer's layers, head and objective on batches of whole rows of equal length, with causal attention."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from transformers import AttentionInterface

    from langgraph_art.protocol import TrainConfig
    from langgraph_art_server.training.head import read_sampled
    from langgraph_art_server.training.objective import reinforcement
    from langgraph_art_server.training.objective.entries import Entries
    from langgraph_art_server.training.tree import TreeCall, build_tree

    def causal(module: Any, query: Any, key: Any, value: Any, mask: None, **_: object) -> tuple[Any, None]:
        output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("causal_rows", causal)
    model = policy_model(directory, checkpointing)
    model.base.config._attn_implementation = "causal_rows"
    config = TrainConfig(scale="none")

    def update(calls: list[Call]) -> float:
        scores, of_run = advantages(calls), tokens_of_runs(calls)
        by_length: dict[int, list[Call]] = {}
        for call in calls:
            by_length.setdefault(len(call.prompt), []).append(call)
        batches = [same[start : start + 4] for _, same in sorted(by_length.items()) for start in range(0, len(same), 4)]
        total = 0.0
        for batch in batches:
            forest = [
                build_tree(
                    [
                        TreeCall(
                            *(call.prompt, call.sampled, [-1.0] * len(call.sampled), 1.0),
                            advantage=scores[call.run],
                            weight=1 / (len(scores) * of_run[call.run]),
                        )
                    ]
                )
                for call in batch
            ]
            output = model.base.get_decoder()(
                input_ids=torch.stack([pack.token_ids for pack in forest]),
                position_ids=torch.stack([pack.positions for pack in forest]),
                use_cache=False,
            )
            hidden = output.last_hidden_state.flatten(0, 1)
            merged = side_by_side(forest)
            loss = reinforcement(read_sampled(hidden, model.head, merged), Entries.of(merged), config).loss
            loss.backward()
            total += float(loss)
        return total

    return update, model.parameters


def side_by_side(forest: list[Any]) -> Any:
    """Packs as one, without merging anything: what they point at is moved by what comes before."""
    import torch

    moved = []
    nodes = distributions = targets = entries = 0
    for pack in forest:
        moved.append(
            replace(
                pack,
                row_nodes=pack.row_nodes + nodes,
                target_rows=pack.target_rows + distributions,
                entry_targets=pack.entry_targets + targets,
                entry_calls=pack.entry_calls + entries,
            )
        )
        nodes += len(pack)
        distributions += len(pack.row_nodes)
        targets += len(pack.target_rows)
        entries += int(pack.entry_calls.max()) + 1
    return replace(moved[0], **{name: torch.cat([getattr(pack, name) for pack in moved]) for name in vars(moved[0])})


def tokens_of_runs(calls: list[Call]) -> list[int]:
    """Sampled tokens of each run."""
    return [sum(len(call.sampled) for call in calls if call.run == run) for run in range(1 + max(c.run for c in calls))]


def trl(directory: Path, checkpointing: bool) -> tuple[Update, dict[str, Any]]:
    """GRPOTrainer on one row per call."""

    def lines(calls: list[Call]) -> list[Line]:
        scores = advantages(calls)
        return [(call.prompt, call.sampled, [1] * len(call.sampled), scores[call.run]) for call in calls]

    return trl_update(lines, directory, checkpointing)


def trl_one_row(directory: Path, checkpointing: bool) -> tuple[Update, dict[str, Any]]:
    """GRPOTrainer on one row per run: the first prompt, then all that followed, context masked out of the loss."""

    def lines(calls: list[Call]) -> list[Line]:
        result = []
        for run, score in enumerate(advantages(calls)):
            own = [call for call in calls if call.run == run]
            prompt, last = own[0].prompt, own[-1].prompt + own[-1].sampled
            mask = [0] * (len(last) - len(prompt))
            for call in own:
                start = len(call.prompt) - len(prompt)
                mask[start : start + len(call.sampled)] = [1] * len(call.sampled)
            result.append((prompt, last[len(prompt) :], mask, score))
        return result

    return trl_update(lines, directory, checkpointing)


Line = tuple[list[int], list[int], list[int], float]
"""A row of TRL: prompt, completion, which of the completion is in the loss, advantage."""


def trl_update(
    lines_of: Callable[[list[Call]], list[Line]], directory: Path, checkpointing: bool
) -> tuple[Update, dict[str, Any]]:
    """TRL's loss and backward pass over micro-batches of rows."""
    import datasets
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS_PER_PASS[checkpointing],
        num_generations=4,
        gradient_checkpointing=checkpointing,
        loss_type="grpo",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        reward_funcs=lambda **_: [0.0],
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["x"]}),
        processing_class=AutoTokenizer.from_pretrained(directory),
        peft_config=peft.LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
        ),
    )
    model = trainer.model
    if checkpointing:  # as its train() does
        model.gradient_checkpointing_enable()
    model.train()
    parameters = {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, value in adapter({name: tuple(p.shape) for name, p in parameters.items()}).items():
            parameters[name].copy_(value)
    padding = 0  # masked, whatever it is

    def update(calls: list[Call]) -> float:
        lines = lines_of(calls)
        per_pass = min(ROWS_PER_PASS[checkpointing], len(lines))
        trainer.current_gradient_accumulation_steps = len(lines) // per_pass
        # As TRL's own rollout code does: prompts padded on the left, completions on the right, to the longest of all.
        left = max(len(prompt) for prompt, *_ in lines)
        right = max(len(completion) for _, completion, *_ in lines)
        total = 0.0
        for start in range(0, len(lines), per_pass):
            part = lines[start : start + per_pass]
            loss = trainer.compute_loss(
                model,
                {
                    "prompt_ids": torch.tensor([[padding] * (left - len(p)) + p for p, *_ in part]),
                    "prompt_mask": torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p, *_ in part]),
                    "completion_ids": torch.tensor([c + [padding] * (right - len(c)) for _, c, *_ in part]),
                    "completion_mask": torch.tensor([[1] * len(c) + [0] * (right - len(c)) for _, c, *_ in part]),
                    "tool_mask": torch.tensor([m + [0] * (right - len(m)) for _, _, m, _ in part]),
                    "advantages": torch.tensor([advantage for *_, advantage in part]),
                },
            )
            loss.backward()
            total += float(loss)
        return total

    return update, parameters


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(method: str, name: str, checkpointing: bool, directory: Path, gradients: Path) -> dict[str, float]:
    """In this process: an update on two calls to warm up, then the one that counts."""
    import torch
    from safetensors.torch import save_file

    make: Callable[[Path, bool], tuple[Update, dict[str, Any]]] = globals()[method]
    calls = workload(name)
    update, parameters = make(directory, checkpointing)
    update([next(call for call in calls if call.run == run) for run in (0, 1)])
    for parameter in parameters.values():
        parameter.grad = None
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun, begun_cpu = time.perf_counter(), time.process_time()
    loss = update(calls)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save_file({key: parameter.grad for key, parameter in parameters.items()}, gradients)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "warm_mb": loaded / 1024,
        "peak_mb": peak / 1024,
        "loss": loss,
        "threads": torch.get_num_threads(),
    }


def in_own_process(method: str, name: str, checkpointing: bool, gradients: Path) -> dict[str, float]:
    """Starts this script for one measurement."""
    command = [sys.executable, __file__, "--measure", method, "--workload", name, "--gradients", str(gradients)]
    done = subprocess.run(
        [*command, "--checkpointing", "on" if checkpointing else "off"],
        # As the server starts its worker, see Trainer: threads that wait do not spin.
        env=os.environ | {"KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{method} on {name} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def difference(one: Path, other: Path) -> float:
    """Relative difference of two sets of gradients."""
    from safetensors.torch import load_file

    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    error = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    size = sum(float(left[name].double().square().sum()) for name in left)
    return float((error / size) ** 0.5)


def ratios(records: list[dict[str, Any]], name: str, checkpointing: bool, config: dict[str, Any]) -> dict[str, Any]:
    """What the measurements of one workload say."""
    own = [r for r in records if (r["workload"], r["checkpointing"]) == (name, checkpointing)]
    middle = {
        (method, what): statistics.median(r[what] for r in own if r["method"] == method)
        for method in METHODS[name]
        for what in ("seconds", "cpu_seconds", "peak_mb", "gradient_difference")
        if any(r["method"] == method for r in own)
    }

    def over_tree(method: str, what: str) -> float | None:
        if (method, what) not in middle or ("tree", what) not in middle:
            return None
        return round(middle[method, what] / middle["tree", what], 3)

    ideal = ideal_flop_saving(workload(name), config, checkpointing=checkpointing)
    memory, memory_one_row = over_tree("trl", "peak_mb"), over_tree("trl_one_row", "peak_mb")
    result = {
        "tree_speedup": over_tree("rows", "seconds"),
        "ideal_flop_saving": round(ideal, 3),
        "speedup_vs_trl": over_tree("trl", "seconds"),
        "peak_memory_vs_trl": memory and round(1 / memory, 3),
    }
    if "trl_one_row" in METHODS[name]:
        result["speedup_vs_trl_one_row"] = over_tree("trl_one_row", "seconds")
        result["peak_memory_vs_trl_one_row"] = memory_one_row and round(1 / memory_one_row, 3)
    return result | {
        "seconds": {m: round(v, 2) for (m, what), v in sorted(middle.items()) if what == "seconds"},
        "cpu_seconds": {m: round(v, 2) for (m, what), v in sorted(middle.items()) if what == "cpu_seconds"},
        "peak_mb": {m: round(v) for (m, what), v in sorted(middle.items()) if what == "peak_mb"},
        "gradient_difference": {
            m: float(f"{v:.1e}") for (m, what), v in sorted(middle.items()) if what == "gradient_difference"
        },
        "repeats": max(sum(r["method"] == method for r in own) for method in METHODS[name]),
    }


def main(
    repeats: Annotated[int, typer.Option(help="Measurements of each kind.")] = 3,
    workload: Annotated[list[str] | None, typer.Option(help="W1, W2; may be given twice. Default: both.")] = None,
    checkpointing: Annotated[list[str] | None, typer.Option(help="on, off. Default: both.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Methods beside the tree, with commas between. Default: all.")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="File to keep measurements in, and to go on from.")] = None,
    measure_: Annotated[str | None, typer.Option("--measure", hidden=True)] = None,
    gradients: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure loss and backward pass: the token tree against rows and against TRL."""
    from langgraph_art_server.models import find_model

    model = find_model(MODEL)
    names, modes = workload or list(METHODS), [mode == "on" for mode in checkpointing or ["on", "off"]]
    if measure_ is not None:
        assert gradients is not None
        print(json.dumps(measure(measure_, names[0], modes[0], model.directory, gradients)))
        return
    kinds = [
        {"repeat": repeat, "workload": name, "checkpointing": mode, "method": method}
        for repeat in range(repeats)
        for name in names
        for mode in modes
        for method in METHODS[name]
        if only is None or method in ["tree", *only.split(",")]
    ]
    records = []
    if results is not None and results.exists():
        records = [json.loads(line) for line in results.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) if results is None else results.with_suffix(".gradients")
        directory.mkdir(exist_ok=True)
        for key in kinds:
            if any(key.items() <= record.items() for record in records):
                continue
            path, expected = (directory / f"{key['workload']}-{m}.safetensors" for m in (key["method"], "tree"))
            record = key | in_own_process(key["method"], key["workload"], key["checkpointing"], path)
            record["gradient_difference"] = difference(expected, path)
            if not record["gradient_difference"] < TOLERANCE:
                raise SystemExit(f"{key['method']} computes another gradient: {record}")
            records.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
            if results is not None:
                with results.open("a") as file:
                    print(json.dumps(record), file=file)
    summary = {
        name: {f"checkpointing_{'on' if mode else 'off'}": ratios(records, name, mode, model.config) for mode in modes}
        for name in names
    }
    print(json.dumps({"machine": describe()} | summary))


if __name__ == "__main__":
    typer.run(main)
