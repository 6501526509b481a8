from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from langgraph_art.protocol import TrainConfig

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def test_the_page_lists_every_option_with_its_default() -> None:
    table = PAGE.partition("## Every option")[2]
    listed = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", table, re.MULTILINE))
    assert listed == {
        name: str(value).replace("'", '"') if not isinstance(value, str) else f'"{value}"'
        for name, value in TrainConfig()
    }


def test_the_page_s_code_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(code, "training.md", "exec"), {})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"epsilon_low": 0.1}, "epsilon_low has no effect with minibatches=1"),
        ({"epsilon_high": 0.3}, "epsilon_high has no effect with minibatches=1"),
        ({"epsilon_high": 0.3, "minibatches": 2, "surrogate": "reinforce"}, "no effect with surrogate='reinforce'"),
        ({"weight": "constant"}, "needs constant_tokens"),
        ({"constant_tokens": 9}, "constant_tokens has no effect with weight='run'"),
        ({"kl_reference": {"p": 3}}, "kl_reference has no effect without kl"),
        ({"distill": 0.5}, "distill has no effect without teacher"),
        ({"correction_limit": 3.0}, "correction_limit has no effect without correction"),
        ({"schedule": "cosine"}, "schedule='cosine' needs schedule_steps"),
        ({"schedule_steps": 10}, "schedule_steps has no effect with schedule='constant'"),
        (
            {"schedule": "linear", "schedule_steps": 10, "warmup_steps": 10},
            "warmup_steps=10 leaves no step of schedule_steps=10",
        ),
        ({"kl": float("nan")}, "finite"),
        ({"learning_rate": 0.0}, "greater than 0"),
        ({"learning_rate": {"p": -1.0}}, "greater than 0"),
        ({"epsilon_low": 1.0, "minibatches": 2}, "less than 1"),
        ({"correction": "token_mask", "correction_limit": 1.0}, "greater than 1"),
        ({"epsilom": 1.0}, "Extra inputs are not permitted"),
    ],
)
def test_options_that_cannot_act(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        TrainConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"epsilon_low": 0.1, "minibatches": 2},
        {"weight": "constant", "constant_tokens": 5},
        {"kl": 0.1, "kl_reference": {"p": 3}},
        {"teacher": "large", "distill": 0.5},
        {"max_staleness": 2, "correction_limit": 3.0},
        {"schedule": "linear", "schedule_steps": 10, "warmup_steps": 9},
        {"learning_rate": {"p": 1e-4}},
    ],
)
def test_what_is_accepted_survives_the_wire(options: dict[str, Any]) -> None:
    config = TrainConfig(**options)
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


def test_stale_calls_are_corrected_by_default() -> None:
    assert TrainConfig().correction is None
    assert TrainConfig(max_staleness=1).correction == "token_truncation"
    assert TrainConfig(max_staleness=1, correction="sequence_mask").correction == "sequence_mask"


def test_presets() -> None:
    grpo = TrainConfig.preset("grpo")
    assert grpo == TrainConfig()
    gspo = TrainConfig.preset("gspo", minibatches=4, epsilon_low=0.01, learning_rate=1e-3)
    assert (gspo.surrogate, gspo.weight, gspo.scale, gspo.epsilon_low) == ("sequence_clip", "run", "group", 0.01)
    assert gspo.learning_rate == 1e-3
    assert TrainConfig.preset("dapo").epsilon_high is None, "one step has no ratio to clip"
    assert TrainConfig.preset("dapo", minibatches=2).epsilon_high == 0.28
    assert TrainConfig.preset("dapo", minibatches=2, epsilon_high=0.3).epsilon_high == 0.3
    assert TrainConfig.preset("dapo").weight == "token"
    dr_grpo = TrainConfig.preset("dr_grpo", constant_tokens=512)
    assert (dr_grpo.surrogate, dr_grpo.weight, dr_grpo.scale) == ("clip", "constant", "none")
    cispo = TrainConfig.preset("cispo")
    assert (cispo.surrogate, cispo.weight, cispo.scale) == ("cispo", "token", "group")
    with pytest.raises(ValidationError, match="needs constant_tokens"):
        TrainConfig.preset("dr_grpo")
    with pytest.raises(ValueError, match="there is no preset 'ppo'; there are grpo, dapo, dr_grpo, gspo, cispo"):
        TrainConfig.preset("ppo")  # type: ignore[arg-type]
