"""Methods that send elements whose accumulated gradient passes a test: Strom, Variance, Hybrid."""
