"""Winnow inside other trainers."""
