"""The PTX machine's own tests."""
