"""`python -m gpulayer`: the command line, where the script is not on the PATH."""

from gpulayer.cli import main

main()
