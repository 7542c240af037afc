"""Base error of invalid input: configuration, data, functions by name."""


class ConfigError(ValueError):
    """Invalid input; the message names the key, file or line, the value and the remedy."""
