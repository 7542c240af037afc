"""Processes that run what cannot be trusted, or cannot share a process: rewards, environments, code."""
