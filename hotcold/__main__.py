"""`python -m hotcold` is the command `hotcold`."""

from hotcold.jobs.cli import run

if __name__ == "__main__":
    run()
