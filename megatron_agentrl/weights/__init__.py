"""Trainer shards to engines: the publish protocol, the Engine interface it needs, transports."""
