"""`python -m gpucr` is the `gpucr` command."""

from gpucr.cli.main import main

if __name__ == "__main__":
    main()
