"""Rewards: what a reward callback may return, ready-made parts, their combination, and an LLM as judge."""

from langgraph_art.rewards.calling import evaluate
from langgraph_art.rewards.combinators import at_least, clip, gate, per_node, weighted_sum
from langgraph_art.rewards.evaluators import from_evaluator
from langgraph_art.rewards.judge import Judge
from langgraph_art.rewards.parts import (
    answer_of,
    cost_penalty,
    exact_match,
    expected_of,
    fuzzy_match,
    json_schema,
    latency,
    length_penalty,
    matches,
    tokens,
    tool_called,
    tool_calls,
    tools_in_order,
)
from langgraph_art.rewards.scores import AnyReward, BadReward, GroupReward, Reward, RewardValue, Score, set_reward
from langgraph_art.rewards.sql import sql_result

__all__ = [
    "AnyReward",
    "BadReward",
    "GroupReward",
    "Judge",
    "Reward",
    "RewardValue",
    "Score",
    "answer_of",
    "at_least",
    "clip",
    "cost_penalty",
    "evaluate",
    "exact_match",
    "expected_of",
    "from_evaluator",
    "fuzzy_match",
    "gate",
    "json_schema",
    "latency",
    "length_penalty",
    "matches",
    "per_node",
    "set_reward",
    "sql_result",
    "tokens",
    "tool_called",
    "tool_calls",
    "tools_in_order",
    "weighted_sum",
]
