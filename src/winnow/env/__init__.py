"""Contract of an environment: prompts, data, rewards, and the workers that run foreign code."""
