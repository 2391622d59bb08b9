"""Groups of ranks: one communication library a file, imported when a caller has an object of it."""
