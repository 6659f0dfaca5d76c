"""Boxes on disk: saving with sharding info, loading, inspecting and merging. Plain Python."""
