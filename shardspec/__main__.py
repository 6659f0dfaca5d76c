"""Runs the command line by ``python -m shardspec``."""

from shardspec.cli.main import main

if __name__ == "__main__":
    main()
