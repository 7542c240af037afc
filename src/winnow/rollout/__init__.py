"""Rollouts: groups on an engine, with environments, gates and rewards; evaluations and pass-rate profiles."""
