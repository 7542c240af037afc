"""Errors that a user can cause or should see; the command prints them without a traceback."""

from ..base.errors import ExpectedError

EXPECTED = (ValueError, OSError, FloatingPointError, ExpectedError)  # ValueError: ConfigError and the tasks' own
