"""Text games of the package textworld."""
