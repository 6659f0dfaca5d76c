"""What is here needs the tools' packages, and is run by `make compat`."""

collect_ignore_glob = ["*"]
