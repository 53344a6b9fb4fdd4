"""`python -m deploy.cli`: run a command of `relaxserve`. `relaxserve run` and fleets start servers with this module."""

from deploy.cli import main

if __name__ == "__main__":
    main()
