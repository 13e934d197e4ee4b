"""The agent: a program on a server of an organisation that claims the jobs of its host, runs them and reports their
results. It needs a Python interpreter and nothing else: standard library only, none of our packages, so that one zip
file (`make agent`) is an installation. docs/agent-protocol.md describes its calls to the server."""
