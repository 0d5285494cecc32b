"""What a saved state consists of, for all frameworks; the frontends write the files."""
