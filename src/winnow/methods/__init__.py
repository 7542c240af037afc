"""Methods: selection, group sizes, gates, filters, advantages, corrections. One method, one file."""
