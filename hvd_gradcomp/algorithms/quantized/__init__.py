"""Methods that send all elements in fewer bits."""
