"""Memory model of a run, from the recipe and the config alone. No torch."""
