"""Helpers independent of rollouts: keyed noise, packed arrays, durable files, intervals, failpoints."""

__version__ = "0.3.0.dev0"
