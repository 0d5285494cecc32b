"""Families of codecs: local mathematics that several algorithms share."""
