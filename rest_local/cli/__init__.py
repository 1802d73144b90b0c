"""The command line: parses, calls the Python API, prints. One file per subcommand; nothing heavy is imported here."""
