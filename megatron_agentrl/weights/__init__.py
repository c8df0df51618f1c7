"""Moving a policy version from the trainer to the engines: manifest, transports, the publish protocol."""
