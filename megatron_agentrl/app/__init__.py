"""The command line and the entry point of each process."""
