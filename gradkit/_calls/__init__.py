"""What an operation takes and gives."""
