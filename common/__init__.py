"""The floor of the house."""
