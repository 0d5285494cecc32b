"""Methods that send some elements: the largest, or a random choice."""
