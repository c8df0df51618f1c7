"""Prompt sources and supervised sets."""
