"""The driver's own tests."""
