from windlass._cli import main

main()
