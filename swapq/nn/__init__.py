"""The swapped modules and the expert block that trainer and engine share."""

from swapq.nn.expert_block import ExpertLinear, FrozenExpertLinear, expert_block
from swapq.nn.gate import Gate

__all__ = ["ExpertLinear", "FrozenExpertLinear", "Gate", "expert_block"]
