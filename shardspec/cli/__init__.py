"""The command line: parses arguments, makes one library call, prints text or JSON."""
