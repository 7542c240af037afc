"""Version of Winnow, importable by every layer."""

__version__ = "0.2.0"
