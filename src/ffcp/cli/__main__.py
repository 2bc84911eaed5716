"""Run the ``ffcp`` command by ``python -m ffcp.cli``."""

from ffcp.cli import main

if __name__ == "__main__":
    main()
