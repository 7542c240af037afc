"""`python -m winnow` is the command `winnow`, also where only the interpreter is on the path."""

from .cli import run

if __name__ == "__main__":
    run()
