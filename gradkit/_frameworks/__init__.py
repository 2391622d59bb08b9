"""One small adapter for each array library: its arrays in as native ones, results out."""
