"""Which rows and columns of which Hugging Face tensor a rank holds, as values. No torch."""
