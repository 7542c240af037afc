"""What several tests build: groups, toy tasks, runs, pages. Tests import from here, never from one another."""
