"""Rewards: what a reward callback may return, ready-made parts, their combination, and an LLM as judge."""

from langgraph_art.rewards.calling import evaluate
from langgraph_art.rewards.combinators import at_least, clip, gate, per_node, weighted_sum
from langgraph_art.rewards.scores import AnyReward, BadReward, GroupReward, Reward, RewardValue, Score, set_reward

__all__ = [
    "AnyReward",
    "BadReward",
    "GroupReward",
    "Reward",
    "RewardValue",
    "Score",
    "at_least",
    "clip",
    "evaluate",
    "gate",
    "per_node",
    "set_reward",
    "weighted_sum",
]
