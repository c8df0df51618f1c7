"""Checkpoints between Hugging Face folders and megatron-core's distributed format, tensor by tensor. No process group."""
