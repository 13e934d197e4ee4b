pytest_plugins = ["ecluse.testing"]
