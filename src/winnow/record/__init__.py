"""Records that a run leaves behind: ledger, metrics, samples, progress."""
