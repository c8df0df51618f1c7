"""Engine processes and their clients, the engine pool, agent workers."""
