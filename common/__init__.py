"""Modules that every other package may import."""
