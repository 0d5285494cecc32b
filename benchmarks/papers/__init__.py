"""What the papers claim, trained again on data that Debian has: `make papers`."""
