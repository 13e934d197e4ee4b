from ecluse.cli.main import main

main()
