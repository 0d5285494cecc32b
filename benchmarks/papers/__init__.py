"""The papers' claims, trained again on data that Debian has: `make papers`."""
