"""``python -m shardspec``: the command line."""

from shardspec.cli.main import main

if __name__ == "__main__":
    main()
