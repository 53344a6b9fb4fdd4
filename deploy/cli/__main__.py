"""`python -m deploy.cli`: run a command of `relaxserve`. `relaxserve run` starts its server process with this module."""

from deploy.cli import main

if __name__ == "__main__":
    main()
