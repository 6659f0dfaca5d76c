"""Tests of the families of models."""
