"""`python -m planaria` is the command `planaria`."""

from planaria.cli.main import main

main()
