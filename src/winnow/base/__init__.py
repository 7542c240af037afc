"""Helpers independent of rollouts: keyed noise, packed arrays, durable files, intervals, failpoints."""
