"""The typed recipe: schema, loading and validation. Imports no torch."""
