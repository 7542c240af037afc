"""The error of everything that is given wrongly: configuration, data, functions by name."""


class ConfigError(ValueError):
    """Something given that cannot run; the message names the key, file or line, the value and the remedy."""
