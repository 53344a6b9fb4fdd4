"""The commands in a process of its own: `relaxserve run` serves by it."""

from deploy.cli import main

if __name__ == "__main__":
    main()
