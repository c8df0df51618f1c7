"""What a run leaves behind and what a person sees: events, metrics, live view, summary, plots."""
