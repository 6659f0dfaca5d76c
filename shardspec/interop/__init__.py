"""Converts specs to and from other libraries; specs without a counterpart are refused."""
