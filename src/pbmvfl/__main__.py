"""`python -m pbmvfl`: the command line."""

from pbmvfl.cli import main

if __name__ == "__main__":
    main()
