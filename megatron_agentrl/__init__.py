"""Reinforcement learning of language-model agents: Megatron-Core trains, vLLM generates."""

__version__ = "0.1.0"
