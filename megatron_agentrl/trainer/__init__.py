"""Megatron-Core: topology, model, step, optimizer, checkpoint."""
