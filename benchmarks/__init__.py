"""Commands that measure, each beside a peer in one process tree; see docs/benchmarks.md."""
