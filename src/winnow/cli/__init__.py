"""The command `winnow`: one file a family of commands."""
