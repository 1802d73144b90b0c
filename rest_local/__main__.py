"""Run the command `rest-local` as `python -m rest_local`."""

from rest_local.cli.main import main

main()
