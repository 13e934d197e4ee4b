"""The command line: read arguments, call the other packages, print the results. No decisions are made here."""
