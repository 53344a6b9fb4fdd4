"""`python -m deploy.cli`: run a command of `relaxserve`. Processes start servers with this module: `relaxserve run`, and a fleet."""

from deploy.cli import main

if __name__ == "__main__":
    main()
