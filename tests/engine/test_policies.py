"""Several policies in one graph on the real engine: one job, one base model, adapters of different shapes."""

from __future__ import annotations

import json
import uuid

import pytest

from langgraph_art import Client, EmbeddedServer, GraphRun, LoraConfig, Score, TrainConfig, Trainer, rollout
from langgraph_art.errors import ServerRefused
from langgraph_art.history import StepLog

from .graphs import two_nodes

pytestmark = pytest.mark.engine


def reward(run: GraphRun) -> Score:
    """Something that differs from run to run, for the graph and for each node."""
    return Score(int(run.run_id[0], 16), nodes={"plan": int(run.run_id[1], 16), "write": int(run.run_id[2], 16)})


def test_one_job_updates_every_policy_and_only_those(server: EmbeddedServer, client: Client) -> None:
    planner, writer, other = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("planner", "writer", "other"))
    client.policies.create(other)
    shapes = {planner: LoraConfig(rank=4, targets=["v_proj", "q_proj"]), writer: LoraConfig(rank=16, alpha=8)}
    trainer = Trainer(
        two_nodes(server.url, planner, writer),
        [{"text": "Say something."}],
        reward,
        policies=shapes,
        url=server.url,
        runs_per_input=6,
        inputs_per_step=1,
        config=TrainConfig(learning_rate={planner: 2e-2, writer: 1e-3}, node_advantage=0.5),
        progress=False,
    )
    steps: list[StepLog] = trainer.fit(2).steps
    assert [log.versions for log in steps] == [{planner: 1, writer: 1}, {planner: 2, writer: 2}]
    for policy, rate in ((planner, 2e-2), (writer, 1e-3)):
        versions = client.policies.get(policy).versions
        assert [(version.parent, version.serving) for version in versions] == [(None, True), (0, True), (1, True)]
        measured = steps[1].metrics[policy]
        assert measured["learning_rate"] == rate
        # The engine sampled from version 1, of another rank and other layers each, as the trainer computes it.
        assert measured["mismatch_max"] < 1e-2
        assert measured["grad_norm"] > 0
    jobs = [[version.job_id for version in client.policies.get(policy).versions[1:]] for policy in (planner, writer)]
    assert jobs[0] == jobs[1], "one job for both"
    assert [version.version for version in client.policies.get(other).versions] == [0]
    checkpoints = server.log_path.parent / "checkpoints"
    assert not (checkpoints / other).exists()
    described = {
        (config["r"], *sorted(config["target_modules"]))
        for path in (checkpoints / planner).glob("*/adapter_config.json")
        for config in [json.loads(path.read_text())]
    }
    assert described == {(4, "q_proj", "v_proj")}

    # One policy alone, by its learning rate; the other stays what it is.
    groups = rollout(trainer.graph, trainer.inputs, n=6, reward=reward, progress=False)
    result = client.train(groups, config=TrainConfig(learning_rate={writer: 1e-3}))
    assert [(update.policy, update.version) for update in result.updates] == [(writer, 3)]
    assert result.skipped == {"call:policy_not_chosen": 6, "option:node_advantage": 1}
    assert client.policies.get(planner).version == 2


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (LoraConfig(rank=17), "rank 17 is above the 16 that this server can serve"),
        (LoraConfig(targets=["q_proj", "lm_head"]), "adapters on lm_head cannot be served; targets can be any of"),
        (LoraConfig(targets=["qkv_proj"]), "adapters on qkv_proj cannot be served"),
    ],
)
def test_a_shape_that_cannot_be_served_is_refused_by_name(client: Client, lora: LoraConfig, says: str) -> None:
    with pytest.raises(ServerRefused, match=says):
        client.policies.create("never", lora)
    assert "never" not in client.info().policies
