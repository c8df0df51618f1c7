"""Text to tokens and back: chat templates, parsers of model output, the sampling contract."""
