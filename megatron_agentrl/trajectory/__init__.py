"""Token-faithful traces: interactions, segments, trajectories, receipts; codec and spool."""
