"""Admission, ledger, batch plan, version registry: receipts, never token payloads."""
