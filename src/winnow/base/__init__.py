"""Helpers that know nothing of rollouts: keyed noise, packed arrays, durable files, intervals, failpoints."""
