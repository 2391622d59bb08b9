"""The built site."""
