"""Household text games of the package alfworld."""
