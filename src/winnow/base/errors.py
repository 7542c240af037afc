"""Base errors: of invalid input, and of anything else that a user should read without a traceback."""


class ConfigError(ValueError):
    """Invalid input; the message names the key, file or line, the value and the remedy."""


class ExpectedError(RuntimeError):
    """A failure of a run or its surroundings; the message says what to do, so the command prints it alone."""
