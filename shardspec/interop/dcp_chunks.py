"""Former name of `shardspec.interop.notations`."""

from shardspec.renamed import renamed_module

__getattr__ = renamed_module(__name__, "shardspec.interop.notations")
