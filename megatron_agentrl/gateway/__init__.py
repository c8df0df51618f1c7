"""The OpenAI wire on one side, tokens on the other; sessions and segments."""
