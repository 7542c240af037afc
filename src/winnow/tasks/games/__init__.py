"""Text games: ALFWorld and TextWorld."""
