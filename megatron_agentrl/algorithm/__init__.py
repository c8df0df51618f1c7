"""Advantages, corrections, losses, KL: pure functions on tensors."""
