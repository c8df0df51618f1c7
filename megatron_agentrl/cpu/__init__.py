"""Everything that exists only because there is no GPU: shims for megatron-core and vLLM."""
