"""The command line: arguments in, one library call, text or JSON out."""
