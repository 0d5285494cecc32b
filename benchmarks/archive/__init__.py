"""Measurements that answered one question; their answer stands in a page, which names them."""
