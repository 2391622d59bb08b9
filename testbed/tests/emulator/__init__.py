"""What the emulator must notice, refuse and compute."""
