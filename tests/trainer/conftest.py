"""megatron-core must find the CPU shim in place before it is first imported."""

from megatron_agentrl.cpu import megatron

megatron.install()
