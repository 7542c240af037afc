"""ARRoL (Cao et al. 2025): prune rollouts while they are generated, by a quality score of their prefix."""
