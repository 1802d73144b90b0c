"""`python -m rest_local` is the command `rest-local`."""

from rest_local.cli.main import main

main()
