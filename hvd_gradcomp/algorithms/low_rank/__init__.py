"""Methods that send factors of matrices: PowerSGD, ACP-SGD."""
