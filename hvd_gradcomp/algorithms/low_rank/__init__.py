"""Methods that send factors of matrices."""
