"""Methods that send elements whose accumulated gradient passes a criterion."""
