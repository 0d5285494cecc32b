"""`python -m hvd_gradcomp` is `hvd-gradcomp`."""

from hvd_gradcomp.cli import main

if __name__ == "__main__":
    main(prog_name="hvd-gradcomp")
